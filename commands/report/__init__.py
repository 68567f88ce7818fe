"""What a run shows: the HTML report and its figures, tables, TensorBoard scalars, Prometheus metrics."""
