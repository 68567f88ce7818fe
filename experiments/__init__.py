"""Experiments with gradbus: benchmarks, figures, studies, examples, configurations. No wheel has them."""
