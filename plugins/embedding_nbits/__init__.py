"""Look-up of rows of an int8 embedding, or of a head's weight."""
