"""Differential privacy of the clients: noise, what it spends, and the mechanisms that are made of them."""
