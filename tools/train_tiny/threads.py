"""Leaves a core to others: uses one thread while processes of normal priority are busy."""

import os
import time
from pathlib import Path

import torch

STAT = Path("/proc/stat")
BUSY = 0.4  # if others use more cores than this, we use one thread


class Threads:
    """A setter of torch's number of threads; under `nice`, so that `user` counts only others."""

    def __init__(self, polite: bool) -> None:
        self.most = torch.get_num_threads()
        self.polite = polite and STAT.exists() and os.nice(0) > 0
        self.before = self.others(), time.monotonic()

    @staticmethod
    def others() -> float:
        """Return the processor seconds of all processes of normal priority since boot."""
        ticks = int(STAT.read_text().split()[1]) if STAT.exists() else 0
        return ticks / os.sysconf("SC_CLK_TCK")

    def adjust(self) -> None:
        """Set the number of threads; call it once per step."""
        if not self.polite:
            return
        used, at = self.others(), time.monotonic()
        share = (used - self.before[0]) / max(1e-3, at - self.before[1])
        torch.set_num_threads(1 if share > BUSY else self.most)
        self.before = used, at
