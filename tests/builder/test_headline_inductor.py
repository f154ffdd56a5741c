"""`mtpbuild build --nextn 3 --tp N --target inductor --device cuda --dtype bfloat16`, and its run.

A small checkpoint of R1's kind, ranks that are processes with fake GPUs, programs that run eagerly
(`tests/support/eager_ranks.py`): all that is not the compiler, NCCL or a GPU is real.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from mtpbuild.builder.models.common.plain import PlainLM
from mtpbuild.lab.verify.plain import load_plain
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.group import start as ranks_module
from tests.support import bfloat16, collectives, eager_ranks
from tests.support.invoke import invoke
from tests.support.r1_like import r1_like
from tests.support.rank_engines import followers

pytestmark = [
    pytest.mark.xdist_group("inductor"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
LENGTH, PROMPTS = 12, [[62, 7, 9, 11, 13, 2], [5]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return r1_like(tmp_path_factory.mktemp("headline"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> PlainLM:
    return load_plain(checkpoint)


@pytest.fixture(autouse=True)
def gpus() -> Iterator[None]:
    with eager_ranks.on_gpus():
        yield


def build_and_run(
    tp: int, checkpoint: Path, model: PlainLM, folder: Path, patch: pytest.MonkeyPatch
) -> None:
    engine = folder / "engine"
    flags = ("--nextn", 3, "--tp", tp, "--prefill-chunk", 4, "--out", engine)
    target = ("--target", "inductor", "--device", "cuda", "--dtype", "bfloat16")
    code, _, err = invoke("build", "--model", checkpoint, *map(str, flags), *target)
    assert (code, err) == (0, "")
    built = read_manifest(engine).build
    assert (built.tp, built.dtype, built.weights, built.drafter) == (
        *(tp, "bfloat16", "nvfp4"),
        "mtp-eagle",
    )
    again = ranks_module.build_command(engine, read_manifest(engine), 1)
    assert " --device cuda --dtype bfloat16 --rank 1 " in again
    for rank in range(tp):
        check_weights(engine / f"rank{rank}" / "weights.safetensors", tp)

    patch.setenv(eager_ranks.GPUS, str(tp))
    patch.setenv(collectives.LOGS, str(folder))
    requests = folder / "requests.jsonl"
    lines = [json.dumps({"input_ids": prompt, "output_tokens": LENGTH}) for prompt in PROMPTS]
    requests.write_text("\n".join(lines))
    asked = ("--input", requests, "--ignore-eos", "--json", "--threads", "1")
    code, out, err = invoke("run", "--engine", engine, *asked)
    assert (code, err) == (0, "")
    assert not followers()
    output = [json.loads(line) for line in out.splitlines()]
    for prompt, answer in zip(PROMPTS, output, strict=True):
        assert len(answer["token_ids"]) == LENGTH
        assert max(gaps(model, prompt, answer["token_ids"])) < bfloat16.NEAR
    assert any(
        answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] for answer in output
    )

    sums = [line for line in collectives.agreed(folder, tp) if ": sum of" in line]
    assert {line.split()[-1] for line in sums if "capture" not in line} == {"bfloat16", "float32"}
    assert any(line.startswith("graph 0: decode of 1: ") for line in sums)


@torch.no_grad()
def gaps(model: PlainLM, prompt: list[int], tokens: list[int]) -> list[float]:
    """How far each token's logit is below the largest one."""
    known = torch.tensor([prompt + tokens[:-1]])
    logits = model.logits(model.main(known))[0, len(prompt) - 1 :]
    below: Tensor = logits.amax(-1) - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return [float(gap) for gap in below]


def check_weights(file: Path, tp: int) -> None:
    """Experts stay in nvfp4, a part of each, the shared one the last; the module is in bf16."""
    with safe_open(file, "pt") as held:
        expert = held.get_slice("layers.0.mlp.down_proj.values")
        assert (expert.get_dtype(), expert.get_shape()) == ("U8", [33, 128 // 2 // tp, 64])
        module = held.get_slice("mtp.0.mlp.down_proj")
        assert (module.get_dtype(), module.get_shape()) == ("BF16", [33, 128 // tp, 64])


@pytest.mark.full
def test_two_ranks(
    checkpoint: Path, model: PlainLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_and_run(2, checkpoint, model, tmp_path, monkeypatch)


@pytest.mark.full
def test_eight_ranks(
    checkpoint: Path, model: PlainLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ranks_module.TIMEOUT, "300")  # eight processes on a few cores
    build_and_run(8, checkpoint, model, tmp_path, monkeypatch)
