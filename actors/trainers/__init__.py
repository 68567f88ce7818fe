"""Clients of a federated run inside of trainers of other libraries, as callbacks of these.

``federated_rounds`` knows no library: it follows the rounds of a run for whatever has a loop of its own, by way of
:func:`gradbus.client`. Each callback translates the hooks of its library, and is the only file that imports it.
"""
