"""MTP modules are trained for prompts of one's own: `mtpbuild tune-head`."""
