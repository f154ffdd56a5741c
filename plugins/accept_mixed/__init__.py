"""Judge drafts and draw tokens, each slot in the mode that its request asks for."""
