"""Latent attention with its per-head projections, packed for the CPU's kernels."""
