"""Latent attention's work between its first two products: norms, rotation, cache rows."""
