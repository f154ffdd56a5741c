"""The distribution that a request samples from, and the token drawn from it by a number."""
