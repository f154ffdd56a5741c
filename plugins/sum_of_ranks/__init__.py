"""The sum of what all ranks have computed, by one launch that reads the other GPUs' memory."""
