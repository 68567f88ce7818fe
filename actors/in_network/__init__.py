"""The aggregator: adds what the workers of data-parallel runs send, so that each sends its gradient once."""
