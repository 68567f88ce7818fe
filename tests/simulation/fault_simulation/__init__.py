"""The shipped controller and clients in one process, in virtual time, with faults that a seed decides."""
