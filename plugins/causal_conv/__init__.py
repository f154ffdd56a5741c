"""A causal depthwise convolution, whose state is the last inputs of each channel."""
