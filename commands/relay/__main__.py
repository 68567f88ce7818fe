"""``python -m gradbus.commands.relay``: the process of a relay that serves. ``gradbus relay`` becomes it."""

from gradbus.commands.relay.process import main

if __name__ == "__main__":
    main()
