"""What goes over the wire: frames, control messages, their limits. Pure: bytes in, objects out."""
