"""Optimizers and learning-rate schedules: those of torch by their names, and the user's own."""
