"""Hugging Face checkpoints: which files they have, and whether a build can read them."""
