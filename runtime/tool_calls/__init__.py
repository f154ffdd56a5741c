"""Calls of tools in answers, in the forms of several models."""
