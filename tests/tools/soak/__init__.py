"""A long run in which something breaks every few seconds, and what must be true of it all the same."""
