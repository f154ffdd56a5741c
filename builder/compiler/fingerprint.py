"""A hash over what a build reads, large files by samples: an engine that has it is not built again.

Of our own code it covers the folders that tracing and lowering use.
"""

import ast
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, pairwise, starmap
from operator import index
from pathlib import Path

from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.checkpoint.side_files import CONFIG, side_files
from mtpbuild.builder.gguf.container import find_own_path, read_file
from mtpbuild.builder.plan.plan import Plan, make_state_specs
from mtpbuild.builder.stages import Watch, ignore, say_time_left
from mtpbuild.builder.targets.target import Target
from mtpbuild.runtime.contract.abi import ABI
from mtpbuild.runtime.contract.drafters import find_drafter
from mtpbuild.runtime.contract.manifest import HASH_LIMIT, hash_file
from mtpbuild.runtime.contract.rules import find_rule
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.limits import measure_limits
from mtpbuild.runtime.safetensors_header import read_header

SMALL = 1 << 24  # bytes of a large checkpoint's file that is hashed whole
WHOLE = 1 << 16  # bytes of a tensor that is hashed whole
SAMPLE, EVERY = 1 << 12, 1 << 20  # a larger one: any EVERY bytes contain a sample of SAMPLE bytes
MAX_THREADS = 8  # a disk reads several files at once faster than one
Span = tuple[int, int]
PACKAGE = "mtpbuild"
TREE = Path(__file__).parents[2]
# What makes every engine. A target's folder, and those of drafters and passes, come to them.
SOURCES = (
    *("builder/checkpoint/*.py", "builder/formats/*.py", "builder/gguf/*.py", "builder/graph/*.py"),
    *("builder/models/**/*.py", "builder/weights/*.py", "builder/plan/plan.py"),
    *("builder/program/*.py", "builder/targets/*.py", "builder/overrides.py"),
    "builder/compiler/calibrate.py",
    *("plugins/**/*.py", "runtime/contract/*.py", "runtime/ranks.py"),
)
Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def hash_files(folder: Path, watch: Watch = ignore) -> dict[str, str]:
    """Return the hash of each file of a checkpoint, by name."""
    try:
        weights = (
            p.name for p in folder.iterdir() if ".safetensors" in p.name or p.suffix == ".gguf"
        )
        names = sorted({CONFIG, *weights, *side_files(folder)})
        files = {name: folder / name for name in names if (folder / name).is_file()}
        large = sum(file.stat().st_size for file in files.values()) > HASH_LIMIT
        limit, hashes, start = SMALL if large else HASH_LIMIT, dict[str, str](), time.monotonic()
        with ThreadPoolExecutor(min(MAX_THREADS, measure_limits().processors)) as threads:
            identities = threads.map(lambda file: hash_samples(file, limit), files.values())
            for number, name in enumerate(files):
                left = say_time_left(start, number, len(files) - number)
                watch(f"fingerprint: file {number + 1} of {len(files)}{left}")
                hashes[name] = next(identities)
        return hashes
    except OSError as error:
        raise CheckpointError(f"{error.filename}: can't be read ({error.strerror})") from None


def hash_head_files(place: Path) -> dict[str, str]:
    """Return the hash of each file of MTP modules that are joined to a checkpoint, by name."""
    from mtpbuild.builder.weights.head import find_head_files

    files = find_head_files(place)
    settings = files[0].parent / CONFIG
    named = [*files, settings] if settings.is_file() else files
    return {f"mtp/{path.name}": hash_samples(path) for path in named}


def fingerprint(
    checkpoint: Mapping[str, str], plan: Plan, target: Target, layers: LayersSlice | None = None
) -> str:
    """Return the sha256 of checkpoint, plan, target, our own code and the compilers' versions.

    checkpoint: its `hash_files`. The result is the same on every machine, so it tells whether ranks
    that were built on different machines belong together.
    """
    # Targets, passes and families may be another package's.
    modules = [type(target).__module__, *target.uses, *plan.style.pipeline.modules]
    modules.append(type(plan.config).__module__)
    if plan.drafter is not None:
        modules += find_drafter(plan.drafter).sources
    inputs = {
        "checkpoint": dict(checkpoint),
        "plan": asdict(plan),
        "target": {"name": target.name, **asdict(target)},
        "rules": [find_rule(name).identity() for name in plan.rules],
        "layers": None if layers is None else str(layers),
        "abi": ABI,
        "states": [spec.model_dump() for spec in make_state_specs(plan)],
        "sources": hash_of_code(*modules),
        "versions": {name: _find_version(name) for name in target.packages},
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def hash_samples(path: Path, hash_limit: int = HASH_LIMIT) -> str:
    """Hash a file; hash a large one by its size, its header and samples of its tensors."""
    size = path.stat().st_size
    if size <= hash_limit:
        return hash_file(path)
    digest, starts = hashlib.sha256(str(size).encode()), find_tensor_starts(path, size)
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):  # or each sample reads what lies around it
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        spans = chain.from_iterable(starmap(choose_sampled_spans, pairwise([*starts, size])))
        for begin, end in chain([(0, starts[0])], spans):
            digest.update(os.pread(file.fileno(), end - begin, begin))
    return digest.hexdigest()


def find_tensor_starts(path: Path, size: int) -> list[int]:
    """Return where the tensors of a safetensors or GGUF file begin; the first ends its header.

    A file that can't be read as such is a header of SMALL bytes and one tensor.
    """
    unreadable = [min(size, SMALL)]
    try:
        if path.suffix == ".gguf":
            path = find_own_path(path)
            places = {t.offset for t in read_file(path).tensors.values() if t.file == path}
            return sorted(places) if places and max(places) <= size else unreadable
        header, _, start = read_header(path)
        offsets = [map(index, entry["data_offsets"]) for entry in header.values()]
        places_and_ends = [(start + begin, start + end) for begin, end in offsets]
    except (CheckpointError, OSError, ValueError, LookupError, TypeError):
        return unreadable
    # Each tensor begins where the one before it ends, and the last one ends the file.
    starts = sorted(begin for begin, _ in places_and_ends)
    ends = [start, *sorted(end for _, end in places_and_ends)]
    return starts if starts and [*starts, size] == ends else unreadable


def choose_sampled_spans(begin: int, end: int) -> Iterator[Span]:
    """Yield the parts of a tensor to hash: all of a small one, samples of a large one.

    Samples begin EVERY - SAMPLE bytes apart: any EVERY bytes contain a sample, and rows of 2^n
    bytes are not all sampled in the same columns.
    """
    if end - begin <= WHOLE:
        yield begin, end
        return
    for at in range(begin, end, EVERY - SAMPLE):
        yield at, min(at + SAMPLE, end)


def _find_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def hash_of_code(*modules: str, tree: Path = TREE) -> str:
    """Return the sha256 of the code that every engine is made by, and of these modules' folders.

    Comments, docstrings and line breaks don't count. tree: the source's root.
    """
    code = {path.relative_to(tree): path for pattern in SOURCES for path in tree.glob(pattern)}
    for name in modules:
        code.update(_list_files_beside(name, tree))
    texts = {str(place): path.read_text(encoding="utf-8") for place, path in code.items()}
    lines = (f"{place}\n{_drop_docstrings(texts[place])}" for place in sorted(texts))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _list_files_beside(name: str, tree: Path) -> dict[Path, Path]:
    """Return the files of a module's folder, by their place on any machine."""
    root, *parts = name.split(".")
    place = tree.joinpath(*parts) if root == PACKAGE else Path(import_module(name).__file__ or "")
    if root != PACKAGE and not parts:
        return {Path(place.name): place}
    folder = place if place.is_dir() else place.parent
    return {Path(root, folder.name, path.name): path for path in folder.glob("*.py")}


@cache
def _drop_docstrings(text: str) -> str:
    """Return a module's code without docstrings."""
    code = ast.parse(text)
    for node in ast.walk(code):
        if isinstance(node, Documented) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(code)
