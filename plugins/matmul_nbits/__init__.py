"""Products with int8 or int4 weights in blocks, which stay quantised in memory."""
