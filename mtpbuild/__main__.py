"""`python -m mtpbuild`: the command where no script is on the path."""

from mtpbuild.builder.cli import app

app(prog_name="mtpbuild")
