"""The first half of a gated MLP: the products with gate and up, and their gating."""
