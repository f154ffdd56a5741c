"""Latent attention between its products, with projections that are packed for the CPU's kernels."""
