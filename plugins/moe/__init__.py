"""Routed experts for the few tokens of a step; for GPU targets only (no ONNX facet)."""
