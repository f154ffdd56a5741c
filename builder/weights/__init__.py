"""The way of a weight: `stored` in the checkpoint, `made` into the engine's, `placed` in a file."""
