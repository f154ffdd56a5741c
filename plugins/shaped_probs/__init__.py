"""The distribution that a request samples from, and drawing a token from it."""
