"""All-reduce between ranks in one launch, which reads the other GPUs' memory."""
