"""What a model architecture brings to the compiler: a folder per family, and what they share."""
