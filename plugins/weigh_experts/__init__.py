"""Weighting of the outputs of all experts, where all of them are computed."""
