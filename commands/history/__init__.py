"""``gradbus check``: the event journals of a run, and the invariants that must hold in them."""
