"""Look-up of rows of an int8 embedding."""
