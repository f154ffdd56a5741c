"""The CPU's kernels: their sources, the layout of their weights, and their operators in ONNX."""
