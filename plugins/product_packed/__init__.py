"""Products with weights that are packed for the CPU's kernels."""
