"""Which rows of a cache each token attends to, where an indexer chooses them (DSA)."""
