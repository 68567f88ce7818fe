"""A Flower app with PyTorch, by messages."""
