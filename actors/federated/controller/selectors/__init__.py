"""Selectors: which clients take part in a round. One file for each."""
