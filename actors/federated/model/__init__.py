"""The model as both sides hold it: which of its tensors are exchanged, and as what."""
