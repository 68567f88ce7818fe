"""What a run leaves in its directory: writing it, reading it, exporting its model."""
