"""A target as another package would bring it: an entry point, and one file for each side."""
