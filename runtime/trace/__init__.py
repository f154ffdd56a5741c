"""Traces record the steps of requests; they are shown as a page, and compared."""
