"""The products that latent attention does for each head, before and behind the attention itself."""
