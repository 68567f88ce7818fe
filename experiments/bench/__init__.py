"""All benchmarks as one suite with one format of results: ``make bench``, with ``PART=quick`` or ``PART=scale``."""
