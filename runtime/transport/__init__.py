"""The door between the bus and whatever carries its bytes: the protocols, the channels, and the transports."""
