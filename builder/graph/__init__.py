"""The form of graph that a target compiles: its style, and the pipeline of ops and passes."""
