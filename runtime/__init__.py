"""The bus and what stands on it: messages, frames, settings, checkpoints, logging."""
