"""All ranks in one process: rank programs in lockstep, or on a model of a network."""
