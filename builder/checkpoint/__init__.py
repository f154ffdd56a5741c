"""Reads Hugging Face checkpoints: which files there are, and their tensors one by one."""
