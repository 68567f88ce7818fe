"""Faults on purpose, points where a process fails, and the journal of what happened."""
