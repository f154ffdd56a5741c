"""Latent attention (MLA) of several query tokens over a latent cache, in the absorbed form."""
