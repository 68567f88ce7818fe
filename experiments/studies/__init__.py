"""Studies behind the pages: costs of algorithms, and claims about in-network aggregation, simulated."""
