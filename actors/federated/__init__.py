"""The Controller and its Clients, and what they pass to each other."""
