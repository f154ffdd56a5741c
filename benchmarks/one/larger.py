"""Measures a mixture whose file is larger than the memory that it may have.

Needs Linux, root and control groups of version 1: a group's limit holds its processes and their
page cache, so the rest of the machine keeps its memory. A copy of the files on a loop device has
the read-ahead of most machines. Our tokens are drawn, so that steps choose different experts; the
routers' biases, which are written into the files, say how often.
"""

import contextlib
import ctypes
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from mmap import PAGESIZE, mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from script import run_command

from mtpbuild.runtime.contract.manifest import WEIGHTS
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.safetensors_header import read_header
from one.cost import as_json, sum_weight_bytes
from one.files import Workshop, on_disk
from one.report import NONE
from one.run import Run
from one.section import Data, Found
from one.shapes import MOE, published
from one.sides import LLAMA, OURS, Side, decode, list_files, ours

GROUPS = Path("/sys/fs/cgroup/memory")
SHARES = (1.0, 0.7, 0.5, 0.3)  # of the file
ROOM = 3 << 26  # bytes of a process besides its file
LAWS = UNIFORM, ZIPF = "uniform", "Zipf"  # how often experts are chosen
OWN, SMALL = "the device's read-ahead", "128 KB"
SHORT = 32  # cached tokens
FILL, COUNTED = "fill", "counted"  # the first ask's other tokens fill memory as the choices do
PIECE = 1 << 23  # bytes of a direct read
GB, MB, MS = 1e-9, 1e-6, 1e3


@dataclass(frozen=True)
class Larger:
    """The section of a recipe's shape."""

    recipe: str = MOE

    def measure(self, run: Run) -> Data:
        if os.geteuid() or not GROUPS.exists():
            raise UsageError("larger-than-memory needs root and control groups of version 1")
        shop = Workshop(run.folder, published(self.recipe, run.layers), run.watch)
        counted = shop.write_checkpoint()
        (engine,) = shop.build("whole", (0,), "--max-seq-len", "1024")
        asks = make_asks(run.steps)
        sides = [ours(OURS, engine, asks, shop.vocabulary)]
        if run.peers is not None:
            gguf, _ = shop.write_gguf()
            sides.append(Side(LLAMA, run.peers, gguf, asks, shop.vocabulary, repack=False))
        held = sum_weight_bytes(engine, counted.config)
        found: Data = {
            "costs": as_json({OURS: counted.step(engine, SHORT, 1)}),
            "disk": read_directly(engine / WEIGHTS),
            "file": on_disk(engine),
            "experts": held["trunk, routed"],
            "always": held["trunk"] + held["head"],
        }
        raw = shop.shape.raw
        for law in LAWS:
            chosen = choose_rates(law, raw["n_routed_experts"], raw["num_experts_per_tok"])
            for side in sides:
                set_biases(side.path, find_biases(chosen))
            rounds = dict(self.run_sides(sides, law, run))
            found[law] = {"chosen": chosen.tolist(), "rounds": rounds}
        return found

    def run_sides(self, sides: list[Side], law: str, run: Run) -> Iterator[tuple[str, list[Data]]]:
        """Yield the answers of each side, read-ahead and share of the file."""
        yield from run_within(sides, OWN, SHARES, run)
        if law == ZIPF:
            with mount_copies([side.path for side in sides], run.folder / "loop") as folder:
                copies = [replace(side, path=folder / side.path.name) for side in sides]
                yield from run_within(copies, SMALL, SHARES[1:3], run)

    def tables(self, found: Found) -> list[Table]:
        every = {name: value for name, value in found.data.items() if name not in LAWS}
        return [self.show_law(law, Found(every | found.data[law], found.machine)) for law in LAWS]

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
            "held, GB",
        ):
            grid.add_column(column, justify="right")
        at_once = found.measured.mean_step(name_run(OURS, OWN, 1.0), COUNTED)
        for ahead in (OWN, SMALL):
            for share in SHARES:
                least = max(at_once or 0.0, count_missing(data, share) / data["disk"])
                for side in (OURS, LLAMA):
                    name = name_run(side, ahead, share)
                    seconds, read = (
                        figure(name, COUNTED)
                        for figure in (found.measured.mean_step, found.measured.read)
                    )
                    if seconds is None or read is None:
                        continue
                    held = found.measured.rounds[name][0]["held"]["bytes"] * GB
                    speed = read / seconds / data["disk"]
                    cells = seconds * MS, least / seconds, read * MB, speed, held
                    limit = f"{least * MS:.0f}" if side == OURS else NONE
                    grid.add_row(
                        f"{share:g}, {ahead}", limit, side, *(f"{cell:.3g}" for cell in cells)
                    )
        return grid


def make_asks(steps: int) -> dict[str, Data]:
    lengths = {FILL: 2 * SHORT, COUNTED: SHORT}
    return {name: decode(steps, n, filled=False, drawn=True) for name, n in lengths.items()}


def name_run(side: str, ahead: str, share: float) -> str:
    return f"{side}, {ahead}, {share:g}"


def run_within(
    sides: list[Side], ahead: str, shares: tuple[float, ...], run: Run
) -> Iterator[tuple[str, list[Data]]]:
    """Run each side with each share of its file in memory."""
    group = find_own_group() / "mtpbuild_larger"
    group.mkdir(exist_ok=True)
    try:
        for share in shares:
            for side in sides:
                name = name_run(side.name, ahead, share)
                run.watch(name)
                limit = int(share * on_disk(side.path)) + ROOM
                (group / "memory.limit_in_bytes").write_text(str(limit), encoding="ascii")
                answers = replace(side, group=group).run(run.threads)
                if "error" in answers:
                    run.watch(f"{side.name} {answers['error']['message']}")
                held = sum(map(count_held, list_files(side.path)))
                yield name, [answers | {"held": {"bytes": held}}]
    finally:
        group.rmdir()


def find_own_group() -> Path:
    """Return this process's control group; limits of its own stay in force within."""
    rows = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    own = next((row.split(":", 2)[2] for row in rows if ":memory:" in row), "/")
    path = GROUPS / own.lstrip("/")
    return path if path.exists() else GROUPS  # a container sees its own group as the root


def count_held(path: Path) -> int:
    """Return the bytes of a file's pages that are in memory."""
    if not path.stat().st_size:
        return 0
    data = np.memmap(path, mode="r")
    pages = np.zeros(-(-data.size // PAGESIZE), np.uint8)
    place, size = ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.size)
    if ctypes.CDLL(None, use_errno=True).mincore(place, size, ctypes.c_void_p(pages.ctypes.data)):
        raise OSError(ctypes.get_errno(), f"mincore of {path}")
    return int((pages & 1).sum()) * PAGESIZE


def set_biases(path: Path, biases: list[float]) -> None:
    """Write the biases of all routers into an engine's weights or a GGUF file."""
    values = np.array(biases, np.float32)
    if path.is_file():
        from gguf import GGUFReader

        for tensor in GGUFReader(path, "r+").tensors:
            if tensor.name.endswith("exp_probs_b.bias"):
                tensor.data[:] = values
        return
    header, _, start = read_header(path / WEIGHTS)
    data = np.memmap(path / WEIGHTS, np.uint8, "r+")
    for name, entry in header.items():
        if name.endswith("e_score_correction_bias"):
            first, last = (start + offset for offset in entry["data_offsets"])
            data[first:last] = values.view(np.uint8)


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
    room = share * data["file"] - data["always"]  # what is left for experts
    held = max(0.0, min(1.0, room / total)) * len(rates)
    beyond = np.clip(np.arange(1, len(rates) + 1) - held, 0.0, 1.0)
    return float((rates * beyond).sum() / len(rates) * total)
