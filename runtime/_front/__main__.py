"""``python -m gradbus``: the command line."""

from gradbus.experiments.cli import main

if __name__ == "__main__":
    main()
