"""``gradbus lab``: commands on hosts of their own, on a network of a given rate, delay and loss, on one machine."""
