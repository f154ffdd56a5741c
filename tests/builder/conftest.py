"""A small checkpoint, and a compiler without torch.export for tests of what is around it."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch.export import ExportedProgram
from torch.fx import Graph

from mtpbuild.builder import model_source
from mtpbuild.builder.models.deepseek_v3.reference import Transformer
from mtpbuild.builder.plan import Plan
from mtpbuild.builder.program.programs import Program
from mtpbuild.builder.program.trace import Traced
from mtpbuild.builder.targets.onnxruntime import OnnxRuntimeTarget
from mtpbuild.builder.weights_file import Placed
from tests.support.checkpoints import SMALLEST, make_predictable, random_checkpoint, save_checkpoint


@pytest.fixture(scope="session")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint `small` of one layer and one module, no tokenizer; don't change it."""
    torch.set_num_threads(1)
    return random_checkpoint(tmp_path_factory.mktemp("checkpoints") / "small", **SMALLEST)


@pytest.fixture(scope="session")
def predictable() -> Transformer:
    """Make a model whose own drafts are often right."""
    torch.set_num_threads(1)
    return make_predictable()


@pytest.fixture(scope="session")
def predictable_folder(predictable: Transformer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("predictable") / "predictable", predictable)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make graphs of two bytes: builds take milliseconds and all else is real."""

    def trace(program: Program, plan: Plan) -> Traced:
        exported = cast(ExportedProgram, SimpleNamespace(graph=Graph()))
        return Traced(program.name, exported, (), (), plan)

    def lower(
        self: OnnxRuntimeTarget, traced: Traced, weights: Mapping[str, Placed], folder: Path
    ) -> str:
        (folder / f"{traced.name}.onnx").write_bytes(b"\x08\x0a")
        return f"{traced.name}.onnx"

    monkeypatch.setattr(model_source, "trace", trace)
    monkeypatch.setattr(OnnxRuntimeTarget, "lower", lower)
