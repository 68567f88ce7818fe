"""Zenoh: links that are dialled to one port of a relay, over TCP or TLS. Only this folder imports ``zenoh``."""
