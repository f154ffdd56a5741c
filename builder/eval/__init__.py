"""`mtpbuild eval` measures how many right answers a looser acceptance costs, and its speed."""
