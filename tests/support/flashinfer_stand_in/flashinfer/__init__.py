"""Stands in, in PyTorch, for the part of FlashInfer that engines call, if it is not installed."""
