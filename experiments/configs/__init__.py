"""Example configurations."""
