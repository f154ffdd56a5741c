"""What the tests stand on: fakes, small checkpoints, toy models and shims of other packages."""
