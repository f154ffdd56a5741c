"""`mtpbuild verify`: checks that an engine's text is its model's, whatever it drafts."""
