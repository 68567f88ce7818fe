"""Programs to copy from."""
