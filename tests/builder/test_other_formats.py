"""Checkpoints in other projects' formats say what their dequantised selves say in transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtpbuild.builder.formats import compressed_tensors, fp8, gptq, modelopt, nvfp4
from mtpbuild.builder.formats import scaled as scaled_values
from mtpbuild.builder.gguf.mapped import Tiles
from mtpbuild.builder.models import load_config
from mtpbuild.builder.models.deepseek_v3 import gguf as deepseek_gguf
from mtpbuild.builder.models.qwen3_5 import gguf as qwen_gguf
from mtpbuild.builder.plan.plan import DrafterName, Plan
from mtpbuild.lab.verify.plain import load_plain
from mtpbuild.runtime.errors import CheckpointError
from tests.reference.eager import EagerPrograms
from tests.support.forced import Run
from tests.support.opened import load_model
from tests.support.other_formats import FORMATS, save_dequantised
from tests.support.planted import Patch, replaced, wrapped
from tests.support.transformers_oracle import transformers_greedy, transformers_model

CHUNK, STEPS = 4, 6
PROMPT = [5, 17, 3, 40, 9]
DRAFTERS: list[tuple[int, DrafterName | None]] = [(0, None), (1, "mtp-vanilla")]


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Without the head and with it, whose drafts are those of the plain model."""
    written = FORMATS[name](tmp_path / "checkpoint")
    written.check()
    plain_folder = save_dequantised(written.folder, tmp_path / "plain")
    theirs, plain = transformers_model(plain_folder), load_plain(plain_folder)
    model = load_model(written.folder, load_config(written.folder))
    for nextn, drafter in DRAFTERS:
        programs = EagerPrograms(Plan(model.config, nextn, drafter, 1, 200, CHUNK), model)
        run = Run(programs, plain, nextn, drafter, CHUNK, np.random.default_rng(0))
        tokens, _ = run.steps(PROMPT, STEPS)
        output = tokens[len(PROMPT) :]
        assert output == transformers_greedy(theirs, PROMPT, len(output))


def changed(to: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda real, *given, **named: to(real(*given, **named))


# A bug of each reader, and a checkpoint that shows it.
BUGS: dict[str, tuple[Patch, str]] = {
    "AWQ's nibbles in sequence": (replaced(gptq, "ORDER", (*range(8),)), "autoawq"),
    "auto-round's AWQ as GPTQ": (
        replaced(gptq, "is_awq", lambda settings: False), "auto_round_awq",
    ),
    "zero points of version 2": (
        replaced(gptq, "find_gptq_version", lambda said: 2), "auto_round_gptq",
    ),
    "groups of the wrong end": (
        wrapped(gptq, "unpack_words", changed(lambda codes: codes.flip(-1))), "auto_round_gptq",
    ),
    "packed columns are turned": (
        wrapped(compressed_tensors, "unpack_stream", changed(lambda codes: codes.flip(-1))),
        "deepseek_w4a16",
    ),
    "words without spare bits": (
        replaced(compressed_tensors, "dense", compressed_tensors.loose), "deepseek_mixed",
    ),
    "scales divide": (
        wrapped(scaled_values, "as_floats", changed(lambda scales: 1 / scales)), "glm4_fp8_block",
    ),
    "scales of another row": (
        wrapped(scaled_values, "as_floats", changed(lambda scales: scales.flip(0))),
        "glm4_fp8_dynamic",
    ),
    "int8 with another row's scale": (
        wrapped(scaled_values, "as_floats", changed(lambda scales: scales.flip(0))), "qwen3_5_w8a8",
    ),
    "exponents off by one": (
        wrapped(scaled_values, "as_floats", changed(lambda scales: 2 * scales)), "deepseek_mixed",
    ),
    "NVFP4's nibbles are exchanged": (
        wrapped(nvfp4, "unpack", lambda real, packed: real(packed << 4 | packed >> 4)), "modelopt",
    ),
    "ModelOpt's rows are exchanged": (
        wrapped(modelopt, "unpack_pairs", changed(lambda values: values.flip(0))), "modelopt",
    ),
    "scales of FP8 in bf16 are halved": (
        wrapped(fp8, "spread", changed(lambda scales: scales / 2)), "fp8 bf16",
    ),
    "GGUF's norms keep their 1": (
        replaced(qwen_gguf, "without_one", lambda factor: factor), "gguf Q4_1",
    ),
    "GGUF's value heads stay tiled": (
        wrapped(Tiles, "grouped", changed(np.sort)), "gguf Q4_1",
    ),
    "GGUF's keys stay transposed": (
        replaced(
            deepseek_gguf,
            "join_keys_and_values",
            lambda keys, values: np.concatenate(
                [keys.reshape(len(keys), -1, values.shape[2]), values], axis=1
            ),
        ),
        "gguf Q5_1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_the_values_show_a_bug(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, name = BUGS[bug]
    written = FORMATS[name](tmp_path / "checkpoint")
    plant(monkeypatch)
    with pytest.raises((AssertionError, CheckpointError)):
        written.check()
