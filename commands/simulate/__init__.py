"""All ranks in one process, on a model of a network."""
