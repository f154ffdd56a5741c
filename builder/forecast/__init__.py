"""`mtpbuild plan`: predicts a model's size and speed on a machine, which need not be at hand."""
