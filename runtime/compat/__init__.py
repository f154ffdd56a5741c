"""Reads configurations and flags of vLLM and TensorRT-LLM into our settings."""
