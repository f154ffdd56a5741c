"""How much work shared memory has: each of its 32 banks gives a word of 4 bytes in a cycle."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
BANKS, WORD = 32, 4
WORDS = 1 << 20  # more than any shared memory has


class Traffic:
    """Counts wavefronts, as Nsight calls the cycles in which banks answer.

    Threads of a warp that want different words of one bank wait for each other. Accesses of 8 and
    16 bytes are those of half a warp and of a quarter, and of a matrix's 8 rows.
    """

    def __init__(self) -> None:
        self.wavefronts = 0

    def add(self, lanes: Array, offsets: Array, width: int) -> None:
        """Count one instruction: where the lanes, of which 32 are a warp, touch `width` bytes."""
        words = np.arange(max(1, width // WORD))
        together = lanes // (BANKS // len(words))
        wanted = np.unique(together[:, None] * WORDS + offsets[:, None] // WORD + words)
        each, counts = np.unique(wanted // WORDS * BANKS + wanted % BANKS, return_counts=True)
        _, first = np.unique(each // BANKS, return_index=True)
        self.wavefronts += int(np.maximum.reduceat(counts, first).sum())
