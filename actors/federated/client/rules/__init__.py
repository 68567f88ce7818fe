"""How a client trains: one file for each rule."""
