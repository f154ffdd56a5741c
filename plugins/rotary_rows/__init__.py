"""Says where a pass's tokens stand: rotary angles, and the cache rows that they see and fill."""
