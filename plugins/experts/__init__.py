"""Routed experts with float weights, for the CPU."""
