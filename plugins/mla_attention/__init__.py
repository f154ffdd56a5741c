"""Multi-token MLA attention over a latent cache (absorbed form)."""
