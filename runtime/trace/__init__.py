"""Traces of requests' steps are written as they come, shown as a page, and compared."""
