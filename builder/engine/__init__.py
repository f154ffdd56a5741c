"""Engine directories during a build: made in a hidden folder, found, shared, moved into place."""
