"""Helpers of the tests: fakes, small checkpoints, toy models and shims of other packages."""
