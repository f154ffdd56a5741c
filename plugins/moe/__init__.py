"""Routed experts for the few tokens of a step; GPU targets only (no ONNX facet)."""
