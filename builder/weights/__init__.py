"""Weights: read from a checkpoint (`stored`), converted (`made`), written to files (`placed`)."""
