"""Runs `mtpbuild` with eager ranks: `python -m tests.support.eager_command serve ..`."""

import torch

from mtpbuild.builder.cli import app
from tests.support import eager_ranks

if __name__ == "__main__":
    torch.set_num_threads(1)
    with eager_ranks.used():
        app()
