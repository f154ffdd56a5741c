"""GGUF files as checkpoints: their tensors under Hugging Face's names, their keys as its files."""
