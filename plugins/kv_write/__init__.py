"""Writing of a step's rows into a cache, in place if the target can."""
