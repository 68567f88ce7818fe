"""A Flower app whose nodes count the lines of a file."""
