"""The work between latent attention's first two products: norms, rotation, cache rows."""
