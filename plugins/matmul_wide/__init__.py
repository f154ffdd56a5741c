"""Products of bf16 whose fp32 sums are not rounded; GPU targets only."""
