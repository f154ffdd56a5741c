"""Grouped-query attention of several query tokens over cache rows of keys and values."""
