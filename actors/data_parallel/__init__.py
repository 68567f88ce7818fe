"""The Worker, one of equal ranks that train one model on shards of the data."""
