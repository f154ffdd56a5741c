"""`mtpbuild bench` measures how fast each nextn is, and says whether MTP pays."""
