"""Text to tokens and back: the tokenizer, chat templates, and the split of thought and answer."""
