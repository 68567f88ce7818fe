"""Addresses, host names and the settings of the network: what transports have in common that go over IP."""
