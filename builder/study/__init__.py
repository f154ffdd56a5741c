"""`mtpbuild study`: where drafts were accepted, from traces."""
