"""Operators of ours for CPUs: a library that onnxruntime loads, and what the builder knows of it."""
