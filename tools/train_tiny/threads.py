"""Leaves a core to others: one thread while processes of normal priority are busy, else all."""

import os
import time
from pathlib import Path

import torch

STAT = Path("/proc/stat")
BUSY = 0.4  # cores in use by others above which one thread is left to us


class Threads:
    """Counts on this process being niced: its own time is then not in the `user` column."""

    def __init__(self, polite: bool) -> None:
        self.most = torch.get_num_threads()
        self.polite = polite and STAT.exists() and os.nice(0) > 0
        self.before = self.others(), time.monotonic()

    @staticmethod
    def others() -> float:
        """Seconds of processor time that processes of normal priority have had since the boot."""
        ticks = int(STAT.read_text().split()[1]) if STAT.exists() else 0
        return ticks / os.sysconf("SC_CLK_TCK")

    def adjust(self) -> None:
        """Call once a step."""
        if not self.polite:
            return
        used, at = self.others(), time.monotonic()
        share = (used - self.before[0]) / max(1e-3, at - self.before[1])
        torch.set_num_threads(1 if share > BUSY else self.most)
        self.before = used, at
