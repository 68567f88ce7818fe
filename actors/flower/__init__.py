"""Flower apps over the bus: messages between a hub, where the ServerApp runs, and nodes, where the ClientApps do.

``hub`` and ``node`` carry payloads and know nothing of Flower. ``payload`` turns Flower's messages into payloads,
``grid`` is what a ServerApp sees, ``apps`` loads apps; these three import flwr.
"""
