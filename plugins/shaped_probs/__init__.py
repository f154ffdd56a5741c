"""The distribution that a request samples from, and the token at a number drawn for it."""
