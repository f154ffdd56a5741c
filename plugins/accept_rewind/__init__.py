"""Strict greedy acceptance: judge a window's drafts, emit tokens, advance committed lengths."""
