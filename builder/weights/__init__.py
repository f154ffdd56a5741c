"""Weights: those of a checkpoint (`stored`), of an engine (`table`), and in files (`placed`)."""
