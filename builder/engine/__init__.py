"""The engine directory as a build sees it: made beside its place, found, shared, put there."""
