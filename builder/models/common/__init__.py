"""Families share these: layers, number formats inside the model, how ranks split and meet."""
