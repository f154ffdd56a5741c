"""Experts with integer weights that stay in their blocks."""
