"""Products of bf16 values whose fp32 sums are not rounded; for GPU targets only."""
