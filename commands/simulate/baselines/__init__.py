"""Other protocols of in-network aggregation, for comparison in the simulator: each from its paper, without I/O."""
