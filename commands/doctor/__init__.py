"""``gradbus doctor``: whether this machine, and the way to others, are fit for gradbus, measured on the spot."""
