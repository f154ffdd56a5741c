"""The first half of a gated feed-forward: two products and what joins them."""
