"""One small file per target, loaded by name."""

from importlib import import_module
from pathlib import Path

from mtpbuild.runtime.errors import EngineFormatError, UsageError
from mtpbuild.runtime.manifest import Manifest
from mtpbuild.runtime.programs.base import Programs

TARGETS = {
    "onnxruntime": "mtpbuild.runtime.programs.onnxruntime",
    "inductor": "mtpbuild.runtime.programs.inductor",
    "tensorrt": "mtpbuild.runtime.programs.tensorrt",
    "tensorrt-rtx": "mtpbuild.runtime.programs.tensorrt",
}


def load_programs(
    folder: Path, manifest: Manifest, *, threads: int | None = None, provider: str | None = None
) -> Programs:
    """Load the programs of an engine that was checked.

    threads: None lets the target choose. provider: of target onnxruntime; None is "cpu".
    """
    name = manifest.target.name
    if name not in TARGETS:
        raise EngineFormatError(f"{folder}: target {name} is unknown; known: {', '.join(TARGETS)}")
    if provider and name != "onnxruntime":
        raise UsageError(
            f"--provider {provider} is for target onnxruntime; {folder} is for target {name}"
        )
    options = {"provider": provider} if provider else {}
    programs: Programs = import_module(TARGETS[name]).load(folder, manifest, threads, **options)
    return programs
