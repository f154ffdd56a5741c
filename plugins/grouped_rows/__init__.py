"""Grouped-query attention's work between its product and its scores: norms, rotation, rows."""
