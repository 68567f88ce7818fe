"""Algorithms of N equal ranks, written once and run by any driver: a :class:`~.requests.Program` yields requests."""
