"""All ranks in one process: rank programs in lockstep."""
