"""Traces of the steps of requests, their HTML page, and their comparison."""
