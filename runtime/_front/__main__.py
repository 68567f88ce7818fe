"""``python -m gradbus``: the command line."""


def main() -> None:
    from gradbus.experiments.cli import main as run

    run()


if __name__ == "__main__":
    main()
