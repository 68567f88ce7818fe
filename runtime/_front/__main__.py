"""``python -m gradbus``: the command line."""


def main() -> None:
    """Entry point. Where a package is missing that even the options need, that is said in one line."""
    try:
        from gradbus.experiments.cli.main import main as run
    except ImportError as error:
        import sys

        from gradbus.runtime.needs import explain

        text = explain(error)
        if not text:
            raise
        sys.exit(f"gradbus: {text}")
    run()


if __name__ == "__main__":
    main()
