"""Engines for the tests, each built once per run and shared by all workers."""

import gc
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from filelock import FileLock

from tests.support.compiler import needs_compiler
from tests.support.engines import EngineBuilder
from tests.support.parts import FIRST, PARTS, part_of

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test reaches for the network,
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:1"  # and one that did would find nobody
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # dozens of processes import the same modules
sys.dont_write_bytecode = False
if "PYTEST_XDIST_WORKER" in os.environ:  # a core each: threads that spin take the others' time
    os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest_plugins = ["tests.support.models"]
if shutil.which("nvidia-smi") is None:  # Triton asks when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=[*PARTS], help="only this part of make test-full")


def pytest_make_parametrize_id(val: object) -> str | None:
    """Cut long values: workers send each other the names of all tests."""
    return f"{val[:40]!s}..." if isinstance(val, str | bytes) and len(val) > 80 else None


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep a file's tests in one worker, so that no other imports and makes what they share."""
    if item.get_closest_marker("xdist_group") is None:
        item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests of `--part`, and let the slowest groups of tests run first."""
    if part := config.getoption("--part"):
        others = [item for item in items if part != part_of(*file_and_mark(item))]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
    for item in items:
        if find_group(item) == "inductor":
            item.add_marker(needs_compiler)
    order = {group: place for place, group in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(find_group(item), len(order)))


def pytest_collection_finish() -> None:
    """Leave what imports have made, millions of objects, out of later collections of garbage."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter take everything down in the end."""
    gc.unfreeze()


def find_group(item: pytest.Item) -> str:
    group = item.get_closest_marker("xdist_group")
    return item.path.stem if group is None else str(group.args[0])


def file_and_mark(item: pytest.Item) -> tuple[str, bool]:
    file = item.path.relative_to(Path(__file__).parent).as_posix()
    return file, item.get_closest_marker("full") is not None


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return one folder for the whole run: pytest-xdist's workers have the same parent."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def zig_library(shared_folder: Path) -> Path:
    """Return the library of CPU kernels that ziglang's compiler makes."""
    pytest.importorskip("ziglang", reason="ziglang is not installed: pip install ziglang")
    from tests.support.cpu_kernels import load_backend

    (folder := shared_folder / "zig").mkdir(exist_ok=True)
    backend, library = load_backend(), folder / "library.so"
    with FileLock(folder / "lock"):
        if not library.exists():
            backend.compile_library(library, backend.ZIG)
    return library


@pytest.fixture(scope="session")
def build_engine(shared_folder: Path) -> EngineBuilder:
    """Return build_engine(model, nextn, drafter=None, **flags): it builds each engine once."""

    def build(
        model: str | Path, nextn: int | Literal["auto"], drafter: str | None = None, **flags: Any
    ) -> Path:
        from tests.support.requests import build as run_build
        from tests.support.requests import build_request

        options = "".join(f"_{name}{value}" for name, value in sorted(flags.items()))
        out = shared_folder / "engines" / f"{Path(model).name}_n{nextn}_{drafter}{options}"
        out.parent.mkdir(exist_ok=True)
        with FileLock(f"{out}.lock"):
            if not out.exists():
                run_build(build_request(model, (nextn,), drafter=drafter, out=out, **flags))
        return out

    return build


@pytest.fixture(scope="session")
def tiny_engine(build_engine: EngineBuilder) -> Callable[..., Path]:
    """Return tiny_engine(nextn, drafter=None), which builds the model that the repository ships.

    All have chunks of 32 tokens: prompts get beyond one, and a build serves many tests, those of
    the server too. No drafter means the one that the build would choose, by name: one engine.
    Those that draft have four slots, their baseline has one: it is built in two thirds of the time.
    """

    def build(nextn: int, drafter: str | None = None, **flags: Any) -> Path:
        from mtpbuild.builder.models import load_config
        from mtpbuild.builder.plan.plan import choose_drafter
        from mtpbuild.builder.plan.recipe import find_model

        config = load_config(find_model("deepseek-tiny").folder)
        chosen = drafter or choose_drafter(config, nextn, None)
        flags = {"max_batch": 4 if nextn else 1, "prefill_chunk": 32} | flags
        return build_engine("deepseek-tiny", nextn, chosen, **flags)

    return build
