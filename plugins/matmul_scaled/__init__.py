"""Products with fp8 and nvfp4 weights, which stay quantised in memory."""
