"""Acceptance of drafts and sampling of tokens, with a mode per slot."""
