"""Gates and ups of an MLP in one, with integer weights that are packed for the CPU's kernels."""
