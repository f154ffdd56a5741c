"""Drawn models: drafts, slots, chunks, threads and kept rows change no bit of what one says.

MTPBUILD_MODELS_SEED (a day as 20261128; today's by default) and MTPBUILD_MODELS_COUNT choose the
models. In the folder MTPBUILD_MODELS_RECORD each finished one is a line; what passed is not run
again, so a run can be continued.
"""

import json
import os
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxscript.onnx_opset import opset24 as op

from mtpbuild.builder.compiler.build import build
from mtpbuild.builder.measure.compare import compare_bits
from mtpbuild.builder.measure.runs import run_prompts
from mtpbuild.plugins.cpu import onnx
from mtpbuild.runtime import Engine
from tests.support.drawn_models import MAX_SEQ_LEN, DrawnModel, draw_model
from tests.support.fake_target import greedy_only
from tests.support.families import FAMILIES, save_family
from tests.support.requests import build_request

SEED = int(os.environ.get("MTPBUILD_MODELS_SEED") or f"{date.today():%Y%m%d}")
COUNT = int(os.environ.get("MTPBUILD_MODELS_COUNT") or 40)
RECORD = os.environ.get("MTPBUILD_MODELS_RECORD")
pytestmark = [pytest.mark.full]


def read_passed() -> set[int]:
    file = Path(RECORD or "", f"{SEED}.jsonl")
    lines = file.read_text().splitlines() if RECORD and file.exists() else []
    return {line["number"] for line in map(json.loads, lines) if line["passed"]}


def record(number: int, drawn: DrawnModel, passed: bool, seconds: float) -> None:
    if RECORD:
        Path(RECORD).mkdir(parents=True, exist_ok=True)
        line = {"number": number, "passed": passed, "seconds": round(seconds), **asdict(drawn)}
        with Path(RECORD, f"{SEED}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


@pytest.mark.parametrize(
    "number",
    [pytest.param(i, marks=pytest.mark.xdist_group(f"models-{i % 2}")) for i in range(COUNT)],
)
def test_nothing_changes_a_bit(number: int, tmp_path: Path) -> None:
    if number in read_passed():
        pytest.skip("it has passed")
    drawn, start, passed = draw_model(SEED, number), time.monotonic(), False
    print(f"again: MTPBUILD_MODELS_SEED={SEED} pytest '{__file__}' -k '[{number}]'\n{drawn}")
    try:
        check_model(drawn, tmp_path)
        passed = True
    finally:
        record(number, drawn, passed, time.monotonic() - start)


def test_a_sum_of_onnxruntime_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bits depend on where a row lies in memory, and it weighs the experts of a softmax."""

    def add(x: Any, axes: list[int], keepdim: bool = False, dtype: Any = None) -> Any:
        return op.ReduceSum(x, op.Constant(value_ints=[*axes]), keepdims=int(keepdim))

    drawn = draw_model(0, [*FAMILIES].index("qwen3-next"))
    experts = {"num_experts": 5, "num_experts_per_tok": 5, "norm_topk_prob": True}
    drawn = replace(drawn, sizes=drawn.sizes | experts, scale=1.0, samples=False)
    check_model(drawn, tmp_path / "right")
    monkeypatch.setitem(onnx.PYTORCH, torch.ops.aten.sum.dim_IntList, add)
    with pytest.raises(AssertionError, match="together True: text"):
        check_model(drawn, tmp_path / "wrong")


def check_model(drawn: DrawnModel, place: Path) -> None:
    """Each request says alone, without drafts, what it says beside others with drafts."""
    folder = save_family(place / "model", drawn.family, drawn.make(), **drawn.sizes)
    engines = []
    with nullcontext() if drawn.samples else greedy_only():
        for name, flags in (("alone", drawn.alone), ("beside", drawn.beside)):
            nextn = (flags["nextn"],)
            flags = {key: value for key, value in flags.items() if key != "nextn"} | drawn.format
            flags |= {"max_seq_len": MAX_SEQ_LEN, "exact": drawn.samples, "out": place / name}
            engines += build(build_request(folder, nextn, **flags))
    prompts, params = drawn.requests()
    with Engine.load(engines[0].folder, threads=1, prefix_cache=False) as alone:
        wanted = run_prompts(alone, prompts, params)
    with Engine.load(engines[1].folder, **drawn.run) as beside:
        for together in (True, False):
            finding = compare_bits(run_prompts(beside, prompts, params, together=together), wanted)
            assert finding.passed, f"together {together}: {finding.detail}"
        if drawn.samples:  # here the text may depend on nextn, but on no neighbour
            params = [replace(own, acceptance="rejection") for own in params]
            both = (run_prompts(beside, prompts, params, together=how) for how in (True, False))
            finding = compare_bits(*both)
            assert finding.passed, f"rejection: {finding.detail}"
