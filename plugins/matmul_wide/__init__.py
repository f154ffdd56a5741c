"""bf16 products that keep their fp32 sums unrounded; for GPU targets only."""
