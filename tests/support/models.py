"""Fixtures: small checkpoints, their engines, and compilers without torch.export."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.plugins.launch import Launch
from mtpbuild.runtime import Engine
from tests.support import installed
from tests.support.checkpoints import SMALLEST, make_predictable, random_checkpoint, save_checkpoint
from tests.support.compiler import COMPILER, NONE
from tests.support.engines import EngineBuilder
from tests.support.fake_target import all_but_mixed_of, quick_target
from tests.support.inductor_engines import touch


@pytest.fixture(scope="session")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint `small` of one layer and one module, no tokenizer; don't change it."""
    torch.set_num_threads(1)
    return random_checkpoint(tmp_path_factory.mktemp("checkpoints") / "small", **SMALLEST)


@pytest.fixture(scope="session")
def predictable() -> PlainDeepseek:
    """Make a model whose own drafts are often right."""
    torch.set_num_threads(1)
    return make_predictable()


@pytest.fixture(scope="session")
def predictable_folder(
    predictable: PlainDeepseek, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("predictable") / "predictable", predictable)


@pytest.fixture(scope="session")
def predictable_engine(predictable_folder: Path, build_engine: EngineBuilder) -> EngineBuilder:
    """predictable_engine(nextn, drafter, **flags) -> an engine of that model, in chunks of 4.

    No drafter means MTP vanilla. Engines that draft have three slots. Tests of such engines are in
    the xdist group `predictable`, for another worker would wait for them.
    """

    def build(nextn: int | Literal["auto"], drafter: str | None = None, **flags: Any) -> Path:
        drafter = drafter or (None if nextn in (0, "auto") else "mtp-vanilla")
        own = {} if "target" in flags else {"portable": False}
        options = {"prefill_chunk": 4, "max_batch": 3 if nextn else 1} | own | flags
        return build_engine(predictable_folder, nextn, drafter, **options)

    return build


@pytest.fixture(scope="session")
def with_rules(predictable_engine: EngineBuilder) -> Callable[[], Path]:
    """with_rules() -> predictable_engine(3) with the rules that `installed.RULES` has, installed.

    Only the step that samples is compiled anew.
    """

    def build() -> Path:
        with all_but_mixed_of(predictable_engine(3)):
            return predictable_engine(3, acceptance_rules=(*installed.RULES,))

    return build


@pytest.fixture(scope="session")
def vanilla(predictable_engine: EngineBuilder) -> Iterator[Engine]:
    """Load the predictable model's engine of three slots and three drafts."""
    with Engine.load(predictable_engine(3), threads=1) as engine:
        yield engine


@pytest.fixture
def quick() -> Iterator[None]:
    """Graphs are two bytes: builds take milliseconds and all else is real."""
    with quick_target("onnxruntime"):
        yield


@pytest.fixture
def quick_inductor() -> Iterator[None]:
    """Do what `quick` does, for target inductor, which asks for a compiler before that."""
    if COMPILER is None:
        pytest.skip(NONE)
    with quick_target("inductor", lower=touch):
        yield


@pytest.fixture
def traced_without_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip kernels on a trace's tensors, which have no memory: Triton's interpreter runs them."""
    run = Launch.run

    def unless_fake(launch: Launch) -> tuple[Tensor, ...]:
        fake = any(isinstance(output, FakeTensor) for output in launch.outputs)
        return launch.outputs if fake else run(launch)

    monkeypatch.setattr(Launch, "run", unless_fake)
