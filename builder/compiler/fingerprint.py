"""A hash over everything that a build reads: builds with equal hashes make the same engine."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from operator import index
from pathlib import Path

from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.checkpoint.side_files import CONFIG, side_files
from mtpbuild.builder.plan.plan import Plan, state_specs
from mtpbuild.builder.sources import hash_of_code
from mtpbuild.builder.targets.target import Target
from mtpbuild.runtime.contract.abi import ABI
from mtpbuild.runtime.contract.drafters import find_drafter
from mtpbuild.runtime.contract.manifest import HASH_LIMIT, hash_file
from mtpbuild.runtime.contract.rules import find_rule
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.safetensors_header import read_header

SMALL = 1 << 24  # bytes of a tensor that is hashed whole
SAMPLE, EVERY = 1 << 12, 1 << 16  # of a larger one, SAMPLE bytes in any EVERY bytes
PIECE = 1 << 20  # bytes that are read at once
MOST_THREADS = 8  # a disk reads several files at once faster than one
Span = tuple[int, int]


def identities(folder: Path) -> dict[str, str]:
    """Return the hash of each file of a checkpoint, by name."""
    try:
        weights = (path.name for path in folder.iterdir() if ".safetensors" in path.name)
        names = sorted({CONFIG, *weights, *side_files(folder)})
        files = {name: folder / name for name in names if (folder / name).is_file()}
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
            return dict(zip(files, threads.map(identity, files.values()), strict=True))
    except OSError as error:
        raise CheckpointError(f"{error.filename}: can't be read ({error.strerror})") from None


def fingerprint(
    checkpoint: Mapping[str, str], plan: Plan, target: Target, layers: LayersSlice | None = None
) -> str:
    """Return the sha256 of checkpoint, plan, target, our own code and the compilers' versions.

    checkpoint: its `identities`. The result is the same on every machine, so ranks that are built
    apart are known to belong together.
    """
    code = [type(target).__module__, getattr(target, "lowering", ""), type(plan.config).__module__]
    code += plan.style.pipeline.modules
    if plan.drafter is not None:
        code += find_drafter(plan.drafter).sources
    inputs = {
        "checkpoint": dict(checkpoint),
        "plan": asdict(plan),
        "target": target.name,
        "rules": [find_rule(name).identity() for name in plan.rules],
        "layers": None if layers is None else str(layers),
        "abi": ABI,
        "states": [spec.model_dump() for spec in state_specs(plan)],
        "sources": hash_of_code(*filter(None, code)),
        "versions": {name: _version(name) for name in target.packages},
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def identity(path: Path, hash_limit: int = HASH_LIMIT) -> str:
    """Hash a file; hash a large one by its size, its small tensors and samples of the others."""
    size = path.stat().st_size
    if size <= hash_limit:
        return hash_file(path)
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb", buffering=0) as file:
        for begin, end in spans_of(path, size):
            for start, stop in pieces(begin, end):
                file.seek(start)
                digest.update(file.read(stop - start))
    return digest.hexdigest()


def spans_of(path: Path, size: int) -> list[Span]:
    """Return the spans of a safetensors file's header and tensors; any other file is one span."""
    try:
        header, _, start = read_header(path)
        found = [map(index, entry["data_offsets"]) for entry in header.values()]
        offsets = [(start + begin, start + end) for begin, end in found]
    except (OSError, ValueError, LookupError, TypeError):
        return [(0, size)]
    # Each tensor begins where the one before it ends, and the last one ends the file.
    ends = [start, *sorted(end for _, end in offsets)]
    if [*sorted(begin for begin, _ in offsets), size] != ends:
        return [(0, size)]
    header_pieces = [(at, min(at + SMALL, start)) for at in range(0, start, SMALL)]
    return header_pieces + list(pairwise(ends))


def pieces(begin: int, end: int) -> Iterator[Span]:
    """Yield the parts of a span to hash: all of a small one, samples of a large one.

    Samples lie EVERY - SAMPLE apart, so that any EVERY bytes have a whole one, and that rows of 2^n
    bytes are not sampled in the same columns.
    """
    if end - begin <= SMALL:
        yield from ((at, min(at + PIECE, end)) for at in range(begin, end, PIECE))
        return
    for at in (*range(begin, end - SAMPLE, EVERY - SAMPLE), end - SAMPLE):
        yield at, at + SAMPLE


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
