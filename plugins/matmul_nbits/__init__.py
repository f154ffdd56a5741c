"""Products with int8 or int4 weights in blocks, which targets multiply as they are."""
