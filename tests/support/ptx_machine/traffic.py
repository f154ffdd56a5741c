"""Counts the work of shared memory: each of 32 banks delivers a word of 4 bytes per cycle."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
BANKS, WORD = 32, 4
WORDS = 1 << 20  # more than any shared memory has


class Traffic:
    """Wavefronts, Nsight's name for the cycles in which banks answer.

    Threads of a warp that access different words of one bank wait for each other. Accesses of 8 and
    16 bytes are served for half a warp and a quarter at a time, those of a matrix for its 8 rows.
    """

    def __init__(self) -> None:
        self.wavefronts = 0

    def add(self, lanes: Array, offsets: Array, width: int) -> None:
        """Count one instruction, whose lanes, 32 to a warp, touch `width` bytes at offsets."""
        words = np.arange(max(1, width // WORD))
        together = lanes // (BANKS // len(words))
        wanted = np.unique(together[:, None] * WORDS + offsets[:, None] // WORD + words)
        each, counts = np.unique(wanted // WORDS * BANKS + wanted % BANKS, return_counts=True)
        _, first = np.unique(each // BANKS, return_index=True)
        self.wavefronts += int(np.maximum.reduceat(counts, first).sum())
