"""Settings of federated and of data-parallel training, checked once."""
