"""Latent attention's products per head, before and after the attention itself."""
