"""How the gradients of all ranks become one step of the optimizer: one file for each exchange."""
