"""``python -m gradbus``: the command line."""

import atexit
import gc
import os
import sys
from contextlib import suppress


class _QuickEnd:
    """Ends the process with the exit code of a command that has ended, without the interpreter's teardown.

    With torch loaded the teardown takes more than a second of a core, in which a client that has left its run still
    counts as running, and everybody on a busy machine waits for it. Nothing is left to do by then: this is the last of
    the exit functions, as it is registered before what is imported later, and threads end before the first of them.
    """

    def __init__(self) -> None:
        self.code: int | None = None  # of no command yet: the interpreter ends as it does
        atexit.register(self)

    def __call__(self) -> None:
        if self.code is None:
            return
        with suppress(OSError, ValueError):  # who reads it is gone: the teardown says so
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.code)


_end = _QuickEnd()


def main() -> None:
    """Entry point. Where a package is missing that even the options need, that is said in one line."""
    # What modules make stays. To look for garbage among it at every 700 objects takes a tenth of a command's start.
    gc.set_threshold(50_000, 20)
    try:
        from gradbus.commands.cli.main import main as run
    except ImportError as error:
        from gradbus.runtime.needs import explain

        text = explain(error)
        if not text and (error.name or "").startswith("gradbus."):
            text = (
                f"{error}. It has come to the checkout after this installation: run 'make setup', or again "
                "'pip install -e .'"
            )
        if not text:
            raise
        sys.exit(f"gradbus: {text}")
    try:
        run()
    except SystemExit as ended:
        _end.code = ended.code if isinstance(ended.code, int) else None
        raise


if __name__ == "__main__":
    main()
