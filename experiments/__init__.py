"""Command line, benchmarks, examples: the only package that wires everything together."""
