"""Experts whose weights are floats, for the CPU."""
