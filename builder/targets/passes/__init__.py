"""Passes that rewrite a traced graph before a target compiles it."""
