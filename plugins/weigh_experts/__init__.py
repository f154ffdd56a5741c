"""Weighs what experts that are all computed have made."""
