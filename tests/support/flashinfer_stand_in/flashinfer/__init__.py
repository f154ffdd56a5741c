"""Stands in for FlashInfer where it is not installed: what an engine calls of it, in PyTorch."""
