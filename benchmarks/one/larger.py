"""Measures a mixture whose file is larger than the memory that it may have.

Needs Linux, root and control groups of version 1: a group's limit holds its processes and their
page cache, so the rest of the machine keeps its memory. A copy of the files on a loop device has
the read-ahead of most machines. Our tokens are drawn, so that steps choose different experts.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from script import run_command

from mtpbuild.runtime.contract.manifest import WEIGHTS
from mtpbuild.runtime.errors import UsageError
from one.cost import as_json, sum_weight_bytes
from one.files import Workshop, on_disk
from one.report import NONE
from one.run import Run
from one.section import Data, Found
from one.shapes import MOE, ROUTER_BIAS, published
from one.sides import LLAMA, OURS, Side, decode, ours

GROUP = Path("/sys/fs/cgroup/memory/mtpbuild_larger")
SHARES = (1.0, 0.7, 0.5, 0.3)  # of the file
ROOM = 3 << 28  # bytes of a process besides its file
LAWS = UNIFORM, ZIPF = "uniform", "Zipf"  # how often experts are chosen
OWN, SMALL = "the device's read-ahead", "128 KB"
SHORT = 32  # cached tokens
PIECE = 1 << 23  # bytes of a direct read
GB, MB, MS = 1e-9, 1e-6, 1e3


@dataclass(frozen=True)
class Larger:
    """The section of a recipe's shape."""

    recipe: str = MOE

    def measure(self, run: Run) -> Data:
        if os.geteuid() or not GROUP.parent.exists():
            raise UsageError("larger-than-memory needs root and control groups of version 1")
        return {law: self.measure_law(law, run) for law in LAWS}

    def measure_law(self, law: str, run: Run) -> Data:
        shape = published(self.recipe, run.layers)
        chosen = choose_rates(law, shape.raw["n_routed_experts"], shape.raw["num_experts_per_tok"])
        if law == ZIPF:
            shape = replace(shape, raw={**shape.raw, ROUTER_BIAS: find_biases(chosen)})
        shop = Workshop(run.folder / law, shape, run.watch)
        shop.folder.mkdir(parents=True, exist_ok=True)
        counted = shop.write_checkpoint()
        (engine,) = shop.build("whole", (0,), "--max-seq-len", "1024")
        shop.drop_checkpoint()
        asks = {"short": decode(run.steps, SHORT, filled=False, drawn=True)}
        sides = [ours(OURS, engine, asks, shop.vocabulary)]
        if run.peers is not None:
            gguf, _ = shop.write_gguf()
            sides.append(Side(LLAMA, run.peers, gguf, asks, shop.vocabulary))
        return {
            "costs": as_json({OURS: counted.step(engine, SHORT, 1)}),
            "disk": read_directly(engine / WEIGHTS),
            "file": on_disk(engine),
            "experts": sum_weight_bytes(engine, counted.config)["trunk, routed"],
            "chosen": chosen.tolist(),
            "rounds": dict(self.run_sides(sides, law, run)),
        }

    def run_sides(self, sides: list[Side], law: str, run: Run) -> Iterator[tuple[str, list[Data]]]:
        """Yield the answers of each side, read-ahead and share of the file."""
        yield from run_within(sides, OWN, SHARES, run)
        if law == ZIPF:
            with mount_copies([side.path for side in sides], run.folder / "loop") as folder:
                copies = [replace(side, path=folder / side.path.name) for side in sides]
                yield from run_within(copies, SMALL, SHARES[1:3], run)

    def tables(self, found: Found) -> list[Table]:
        return [self.show_law(law, Found(found.data[law], found.machine)) for law in LAWS]

    def show_law(self, law: str, found: Found) -> Table:
        data = found.data
        title = (
            f"{self.recipe}, int4 beside Q4_0; experts chosen: {law}; file {data['file'] * GB:.1f} "
            f"GB; disk {data['disk'] * GB:.2f} GB/s"
        )
        grid = Table("file in memory", title=title, title_justify="left")
        for column in (
            "limit, ms",
            "side",
            "ms a token",
            "limit's speed",
            "MB read",
            "of the disk",
        ):
            grid.add_column(column, justify="right")
        at_once = found.measured.mean_step(name_run(OURS, OWN, 1.0), "short")
        for ahead in (OWN, SMALL):
            for share in SHARES:
                least = max(at_once or 0.0, count_missing(data, share) / data["disk"])
                for side in (OURS, LLAMA):
                    name = name_run(side, ahead, share)
                    seconds, read = (
                        figure(name, "short")
                        for figure in (found.measured.mean_step, found.measured.read)
                    )
                    if seconds is None or read is None:
                        continue
                    cells = seconds * MS, least / seconds, read * MB, read / seconds / data["disk"]
                    limit = f"{least * MS:.0f}" if side == OURS else NONE
                    grid.add_row(
                        f"{share:g}, {ahead}", limit, side, *(f"{cell:.3g}" for cell in cells)
                    )
        return grid


def name_run(side: str, ahead: str, share: float) -> str:
    return f"{side}, {ahead}, {share:g}"


def run_within(
    sides: list[Side], ahead: str, shares: tuple[float, ...], run: Run
) -> Iterator[tuple[str, list[Data]]]:
    """Run each side with each share of its file in memory."""
    GROUP.mkdir(exist_ok=True)
    try:
        for share in shares:
            for side in sides:
                name = name_run(side.name, ahead, share)
                run.watch(name)
                limit = int(share * on_disk(side.path)) + ROOM
                (GROUP / "memory.limit_in_bytes").write_text(str(limit), encoding="ascii")
                answers = replace(side, group=GROUP).run(run.threads)
                if "error" in answers:
                    run.watch(f"{side.name} {answers['error']['message']}")
                yield name, [answers]
    finally:
        GROUP.rmdir()


@contextlib.contextmanager
def mount_copies(paths: list[Path], folder: Path) -> Iterator[Path]:
    """Copy files and folders to a loop device, which reads 128 KB ahead."""
    folder.mkdir(parents=True, exist_ok=True)
    image, device = folder.with_suffix(".img"), ""
    with image.open("wb") as file:
        file.truncate(int(1.05 * sum(map(on_disk, paths))) + (1 << 28))
    try:
        run_command(["mkfs.ext4", "-q", "-F", str(image)])
        attach = ["losetup", "--direct-io=on", "--find", "--show", str(image)]
        device = run_command(attach).strip()
        run_command(["blockdev", "--setra", "256", device])  # sectors
        run_command(["mount", device, str(folder)])
        for path in paths:
            copy = shutil.copytree if path.is_dir() else shutil.copyfile
            copy(path, folder / path.name)
        yield folder
    finally:
        if os.path.ismount(folder):
            run_command(["umount", str(folder)])
        if device:
            run_command(["losetup", "--detach", device])
        image.unlink()


def read_directly(path: Path, most: int = 1 << 30) -> float:
    """Return the bytes per second of reading a file past the page cache."""
    buffer, count = mmap(-1, PIECE), min(most, path.stat().st_size) // PIECE
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        start = time.perf_counter()
        for i in range(count):
            os.preadv(file, [buffer], i * PIECE)
        return count * PIECE / (time.perf_counter() - start)
    finally:
        os.close(file)


def choose_rates(law: str, experts: int, k: int) -> NDArray[np.float64]:
    """Return how often a token chooses each expert of a layer, the most frequent first."""
    weights = np.ones(experts) if law == UNIFORM else 1 / np.arange(1, experts + 1)
    rates = weights * (k / weights.sum())
    while rates.max() > 1:  # none is chosen twice
        free = rates < 1
        rates = np.where(free, weights, 1.0)
        rates[free] *= (k - (~free).sum()) / weights[free].sum()
    return rates


def find_biases(rates: NDArray[np.float64], draws: int = 4096, rounds: int = 500) -> list[float]:
    """Return router biases with which scores of random tokens choose experts at these rates."""
    random = np.random.default_rng(0)
    scores = 1 / (1 + np.exp(-random.standard_normal((draws, len(rates)))))
    k, biases = round(rates.sum()), np.zeros(len(rates))
    for i in range(rounds):
        best = np.argpartition(-(scores + biases), k - 1)[:, :k]
        counts = np.bincount(best.ravel(), minlength=len(rates)) / draws
        biases += 0.5 / (1 + i / 20) * (rates - counts)
    return [float(bias) for bias in biases]


def count_missing(data: Mapping[str, Any], share: float) -> float:
    """Return the bytes that a token needs and memory has not, if it holds the best experts."""
    rates, total = np.array(data["chosen"]), data["experts"]
    room = share * data["file"] - (data["file"] - total)  # what is left for experts
    held = max(0.0, min(1.0, room / total)) * len(rates)
    beyond = np.clip(np.arange(1, len(rates) + 1) - held, 0.0, 1.0)
    return float((rates * beyond).sum() / len(rates) * total)
