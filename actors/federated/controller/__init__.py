"""The Controller: rounds, clients, sums and checkpoints."""
