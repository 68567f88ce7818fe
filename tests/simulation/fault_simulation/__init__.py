"""The shipped actors in one process, in virtual time, with faults that a seed decides."""
