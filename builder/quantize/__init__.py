"""Quantised weights: the number formats, which weights they are for, and `mtpbuild quantize`."""
