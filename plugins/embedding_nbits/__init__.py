"""Looks up rows of an int8 embedding."""
