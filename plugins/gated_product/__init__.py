"""The first half of a gated feed-forward: the products with gate and up, and their gating."""
