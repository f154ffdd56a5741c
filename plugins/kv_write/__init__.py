"""Writes a step's rows into a cache, once per step, and in place where the target can."""
