"""The positions of a pass's tokens: rotary angles, and the cache rows that are seen and written."""
