"""`mtpbuild plan`: what a model needs and how fast it runs on a machine, before there is one."""
