"""Multi-token grouped-query attention over cache rows of keys and values."""
