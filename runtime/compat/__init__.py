"""Reads what vLLM and TensorRT-LLM call a setting: two tables, and a function that reads them."""
