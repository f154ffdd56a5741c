"""The CPU's kernels: C++ sources, the layout of their weights, and their operators in ONNX."""
