"""Engines for the tests, each built once per run and shared by all workers."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from filelock import FileLock

from tests.support.engines import EngineBuilder

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
if shutil.which("nvidia-smi") is None:  # Triton asks when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """One folder for the whole run: pytest-xdist's workers have the same parent."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def build_engine(shared_folder: Path) -> EngineBuilder:
    """build_engine(model, nextn, drafter=None, **flags) -> engine directory, built at most once."""

    def build(
        model: str | Path, nextn: int | Literal["auto"], drafter: str | None = None, **flags: Any
    ) -> Path:
        from mtpbuild.builder.build import build as run_build
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
    """tiny_engine(nextn, drafter=None) -> an engine of the model that the repository ships.

    All have chunks of 32 tokens: prompts get beyond one, and a build serves many tests.
    """

    def build(nextn: int, drafter: str | None = None, **flags: Any) -> Path:
        return build_engine("deepseek-tiny", nextn, drafter, prefill_chunk=32, **flags)

    return build
