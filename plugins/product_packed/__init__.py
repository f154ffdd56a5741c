"""Products with integer weights that are packed for the CPU's kernels."""
