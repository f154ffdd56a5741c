"""Rewrites of a traced graph that a target wants before it compiles."""
