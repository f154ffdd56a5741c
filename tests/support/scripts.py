"""Imports scripts, which are no packages."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def load_script(path: Path, name: str | None = None) -> ModuleType:
    """Import a file as a module of that name."""
    spec = importlib.util.spec_from_file_location(name or path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def benchmark(name: str) -> ModuleType:
    """Import a module of the benchmarks; its neighbours can be imported, as when it is run."""
    for folder in (BENCHMARKS, BENCHMARKS / "peer"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    return importlib.import_module(name)
