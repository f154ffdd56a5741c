"""Products with fp8 and nvfp4 weights that stay so."""
