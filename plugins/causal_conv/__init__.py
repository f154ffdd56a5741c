"""A convolution over the newest tokens of each channel, which keeps its last inputs as a state."""
