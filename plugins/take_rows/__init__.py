"""Selection of consecutive rows of each slot."""
