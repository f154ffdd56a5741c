"""Latent attention's per-head projections, before and after the attention itself."""
