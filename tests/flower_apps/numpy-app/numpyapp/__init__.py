"""A Flower app with NumPy, by client_fn and NumPyClient."""
