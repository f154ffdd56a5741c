"""Choice of the cache rows that each token attends to, by an indexer (DSA)."""
