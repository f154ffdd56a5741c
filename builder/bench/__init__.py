"""`mtpbuild bench`: measures the speed of each nextn and recommends one."""
