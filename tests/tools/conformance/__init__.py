"""PyTorch's own tests of torch.distributed, run over gloo and over dds: ``make conformance``."""
