"""Calls of CUDA's driver, with torch and without."""
