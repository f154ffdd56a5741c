"""`mtpbuild eval`: what a looser acceptance costs in right answers, and gains in speed."""
