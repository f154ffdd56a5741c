"""Picks rows of each slot."""
