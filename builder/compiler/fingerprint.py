"""A hash over everything that a build reads: builds with equal hashes make the same engine.

Of our own code it covers all that tracing and lowering import.
"""

import ast
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
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
MOST_THREADS = 8  # a disk reads several files at once faster than one
Span = tuple[int, int]
PACKAGE = "mtpbuild"
TREE = Path(__file__).parents[2]
# These modules import the rest: weights, the step program, operators, the contract.
STAGES = ("builder.program.opened_model", "builder.weights.placed", "builder.program.trace")
# The only modules of the runtime that graphs depend on.
CONTRACT = (f"{PACKAGE}.runtime.contract.", f"{PACKAGE}.runtime.ranks")
# This module imports all families. An engine depends on its own alone, which the caller names.
REGISTRY = f"{PACKAGE}.builder.models"
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
        with ThreadPoolExecutor(min(MOST_THREADS, measure_limits().processors)) as threads:
            identities = threads.map(lambda file: identity(file, limit), files.values())
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
    return {f"mtp/{path.name}": identity(path) for path in named}


def fingerprint(
    checkpoint: Mapping[str, str], plan: Plan, target: Target, layers: LayersSlice | None = None
) -> str:
    """Return the sha256 of checkpoint, plan, target, our own code and the compilers' versions.

    checkpoint: its `hash_files`. The result is the same on every machine, so it tells whether ranks
    that were built on different machines belong together.
    """
    modules = [type(target).__module__, type(plan.config).__module__, *plan.style.pipeline.modules]
    if plan.calibrated is not None:
        modules.append(f"{PACKAGE}.builder.weights.calibration")
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


def identity(path: Path, hash_limit: int = HASH_LIMIT) -> str:
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
    """Return the sha256 of all code that these modules and the stages of a build import.

    Comments, docstrings and line breaks don't count. The folder of a model family or an operator
    counts as a whole, since its modules are imported late and by name. tree: the source's root.
    """
    found, todo = dict[str, str](), [*(f"{PACKAGE}.{stage}" for stage in STAGES), *modules]
    own = {name.partition(".")[0] for name in todo}
    while todo:
        name = todo.pop()
        path = None if name in found else _find_module_file(name, tree)
        if path is None:
            continue
        found[name], imported = _parse_code(path.read_text(encoding="utf-8"))
        if name != REGISTRY:
            names = (*imported, *_find_modules_beside(name, path, tree))
            todo += [each for each in names if each.partition(".")[0] in own and _is_covered(each)]
    return hashlib.sha256("\n".join(f"{n}\n{found[n]}" for n in sorted(found)).encode()).hexdigest()


@cache
def _parse_code(text: str) -> tuple[str, tuple[str, ...]]:
    """Return a module's code without docstrings, and the names that it imports."""
    code = ast.parse(text)
    imported = tuple(_find_imported_names(code))
    for node in ast.walk(code):
        if isinstance(node, Documented) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(code), imported


def _is_covered(name: str) -> bool:
    return not name.startswith(f"{PACKAGE}.runtime") or name.startswith(CONTRACT)


def _find_module_file(name: str, tree: Path) -> Path | None:
    """Return a module's file, or None if the name is not a module's but, say, a function's."""
    root, *rest = name.split(".")
    module = sys.modules.get(root)
    folders = [str(tree)] if root == PACKAGE else [*getattr(module, "__path__", ())]
    if not folders:
        found = None if rest else getattr(module, "__file__", None)
        return None if found is None else Path(found)
    place = Path(folders[0]).joinpath(*rest)
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _find_imported_names(code: ast.AST) -> Iterator[str]:
    """Yield all names that a module imports, at any depth, except those for types alone."""
    for node in ast.iter_child_nodes(code):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and str(node.value).startswith(f"{PACKAGE}."):
            yield str(node.value)  # imported late, by this name
        else:
            yield from _find_imported_names(node)


def _find_modules_beside(name: str, path: Path, tree: Path) -> Iterator[str]:
    """Yield the other modules of a folder that is a family's or an operator's."""
    families, operators = tree / "builder" / "models", tree / "plugins"
    folder = path.parent
    if folder.parent in (families, operators) and folder.name != "common":
        above = name if path.name == "__init__.py" else name.rpartition(".")[0]
        names = (file.stem for file in folder.glob("*.py"))
        yield from (above if stem == "__init__" else f"{above}.{stem}" for stem in names)
