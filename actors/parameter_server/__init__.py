"""Parameter servers: servers that hold the weights, and workers that send them gradients."""
