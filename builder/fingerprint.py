"""One hash over everything that a build reads: builds with equal hashes make the same engine."""

import hashlib
import json
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.checkpoint.side_files import CONFIG, side_files
from mtpbuild.builder.plan import Plan, state_specs
from mtpbuild.builder.sources import hash_of_code
from mtpbuild.builder.targets.target import Target
from mtpbuild.runtime.contract.abi import ABI
from mtpbuild.runtime.contract.drafters import find_drafter
from mtpbuild.runtime.contract.manifest import HASH_LIMIT, hash_file
from mtpbuild.runtime.contract.rules import find_rule
from mtpbuild.runtime.errors import CheckpointError

SAMPLE, EVERY = 1 << 12, 1 << 23  # bytes that are read of a large file


def fingerprint(folder: Path, plan: Plan, target: Target, layers: LayersSlice | None = None) -> str:
    """Returns the sha256 of checkpoint, plan, target, our own code and the compilers' versions.

    It is the same on every machine, so ranks that are built apart are known to belong together.
    """
    try:
        weights = (path.name for path in folder.iterdir() if ".safetensors" in path.name)
        files = sorted({CONFIG, *weights, *side_files(folder)})
        checkpoint = {name: identity(folder / name) for name in files if (folder / name).is_file()}
    except OSError as error:
        raise CheckpointError(f"{error.filename}: can't be read ({error.strerror})") from None
    code = [type(target).__module__, getattr(target, "lowering", ""), type(plan.config).__module__]
    if plan.drafter is not None:
        code += find_drafter(plan.drafter).sources
    inputs = {
        "checkpoint": checkpoint,
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
    """Hash a file; of a large one only its size and samples: reading all of R1 takes too long."""
    size = path.stat().st_size
    if size <= hash_limit:
        return hash_file(path)
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb", buffering=0) as file:
        for start in (*range(0, size, EVERY), size - SAMPLE):
            file.seek(start)
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
