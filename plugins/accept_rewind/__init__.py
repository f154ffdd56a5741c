"""Judge a window's drafts, emit tokens, advance the committed lengths."""
