"""`mtpbuild plan` foretells a model's size and speed on a machine that one need not have."""
