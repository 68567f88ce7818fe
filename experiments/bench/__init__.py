"""All benchmarks as one suite with one format of results: ``make bench``, ``bench-quick``, ``bench-scale``."""
