"""The tokens that a step may emit: those of a grammar or JSON schema, and those of a list."""
