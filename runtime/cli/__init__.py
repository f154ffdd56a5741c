"""The commands `run`, `inspect` and `diff`, and what all commands share: flags and output."""
