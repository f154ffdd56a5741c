"""A build, from a request to engine directories, and what else makes or changes engines."""
