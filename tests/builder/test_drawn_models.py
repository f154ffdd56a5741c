"""Drawn models: drafts, slots, chunks, threads and kept rows change no bit of what one says.

MTPBUILD_MODELS_SEED (a day as 20261128; today's by default) and MTPBUILD_MODELS_COUNT choose the
models. In the folder MTPBUILD_MODELS_RECORD each finished one is a line; what passed is not run
again, so a run can be continued.
"""

import json
import os
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path

import pytest
from onnxscript.onnx_opset import opset24 as op

from mtpbuild.lab.measure.compare import compare_bits
from mtpbuild.lab.measure.runs import TimedAnswer, run_prompts
from mtpbuild.plugins.cpu import onnx
from mtpbuild.runtime import Engine
from tests.support.drawn_models import MAX_SEQ_LEN, DrawnModel, draw_model
from tests.support.fake_target import greedy_only
from tests.support.families import FAMILIES, save_family
from tests.support.requests import altered, build, build_request

SEED = int(os.environ.get("MTPBUILD_MODELS_SEED") or f"{date.today():%Y%m%d}")
COUNT = int(os.environ.get("MTPBUILD_MODELS_COUNT") or 40)
pytestmark = [pytest.mark.full]


@pytest.mark.parametrize("number", range(COUNT))
def test_nothing_changes_a_bit(number: int, tmp_path: Path) -> None:
    record = Path(os.environ.get("MTPBUILD_MODELS_RECORD") or tmp_path, f"{SEED}.jsonl")
    lines = record.read_text().splitlines() if record.exists() else []
    if [number, "passed"] in (json.loads(line)[:2] for line in lines):
        pytest.skip("it has passed")
    drawn, result = draw_model(SEED, number), "failed"
    print(f"again: MTPBUILD_MODELS_SEED={SEED} pytest {__file__} -k '[{number}]'\n{drawn}")
    try:
        check_model(drawn, tmp_path)
        result = "passed"
    finally:
        record.parent.mkdir(parents=True, exist_ok=True)
        with record.open("a") as file:
            file.write(json.dumps([number, result, asdict(drawn)]) + "\n")


def test_a_sum_of_onnxruntime_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bits depend on where a row lies in memory, and it weighs the experts of a softmax."""
    drawn = draw_model(0, [*FAMILIES].index("qwen3-next"))
    five = {"num_experts": 5, "num_experts_per_tok": 5}
    sizes = drawn.sizes | five | {"norm_topk_prob": True, "mlp_only_layers": []}
    drawn = replace(drawn, sizes=sizes, scale=1.0, samples=False)
    check_model(drawn, tmp_path / "right")
    last = {"value_ints": [-1]}
    monkeypatch.setattr(onnx, "Sum", lambda x: op.ReduceSum(x, op.Constant(**last), keepdims=0))
    with pytest.raises(AssertionError, match="text "):
        check_model(drawn, tmp_path / "wrong")


def check_model(drawn: DrawnModel, place: Path) -> None:
    """Each request says alone, without drafts, what it says beside others with drafts."""
    folder = save_family(place / "model", drawn.family, drawn.make(), **drawn.sizes)
    shared = drawn.format | {"max_seq_len": MAX_SEQ_LEN, "exact": drawn.samples}
    with nullcontext() if drawn.samples else greedy_only():
        request = build_request(folder, (0,), out=place / "alone", **drawn.alone, **shared)
        ours = altered(request, nextn=(drawn.nextn,), out=place / "beside", **drawn.beside)
        alone, beside = (build(each)[0].folder for each in (request, ours))
    prompts, params = drawn.requests()
    with Engine.load(alone, threads=1, prefix_cache=False) as engine:
        wanted = run_prompts(engine, prompts, params)
    with Engine.load(beside, **drawn.run) as engine:
        check_bits(run_prompts(engine, prompts, params, together=True), wanted)
        check_bits(run_prompts(engine, prompts, params), wanted)
        if drawn.samples:  # here the text may depend on nextn, but on no neighbour
            params = [replace(own, acceptance="rejection") for own in params]
            together = run_prompts(engine, prompts, params, together=True)
            check_bits(together, run_prompts(engine, prompts, params))


def check_bits(ours: list[TimedAnswer], theirs: list[TimedAnswer]) -> None:
    finding = compare_bits(ours, theirs)
    assert finding.passed, finding.detail
