"""``gradbus dashboard``: runs as they go on, in a browser of this machine."""
