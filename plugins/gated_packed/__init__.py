"""Gates and ups of an MLP in one product, with weights that are packed for the CPU's kernels."""
