"""`mtpbuild eval`: measures how many correct answers a looser acceptance costs, and its speed."""
