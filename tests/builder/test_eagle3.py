"""EAGLE-3 heads in three dialects: every step's drafts against a recompute, and planted faults."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from mtpbuild.builder.compiler.refit import refit
from mtpbuild.builder.models import load_config
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.weights.head import open_head, read_head_config
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.errors import CheckpointError, UsageError
from tests.reference.eagle3 import TAPS
from tests.support.eagle3 import DIALECTS, Change, load_with_head, save_head
from tests.support.eagle3_gguf import write_gguf_head
from tests.support.families import make_family, save_family
from tests.support.invoke import refusal
from tests.support.requests import build, build_request
from tests.support.steps import CHUNK, check_steps


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("dialect", ["eagle", "specforge", "narrow"])
def test_a_gguf_head_is_the_one_that_it_was_made_from(dialect: str, tmp_path: Path) -> None:
    trunk = make_family("qwen3")
    folder = save_family(tmp_path / "qwen3", "qwen3", trunk)
    raw, weights = save_head(tmp_path / "head", dialect, trunk)
    raw["rms_norm_eps"] = 2**-17  # a file has it in fp32
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 2**-17}))
    file = write_gguf_head(tmp_path / "head.gguf", raw, weights)
    config = load_config(folder)
    first, second = (read_head_config(p, folder, config) for p in (tmp_path / "head", file))
    assert first == second
    wanted, read = (open_head(place, config) for place in (tmp_path / "head", file))
    assert wanted.tensors.keys() == read.tensors.keys()
    for name in wanted.tensors:
        assert torch.equal(wanted.read(name), read.read(name)), name


def test_other_gguf_files_are_no_head(tmp_path: Path) -> None:
    trunk = make_family("qwen3")
    folder = save_family(tmp_path / "qwen3", "qwen3", trunk)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    line = refusal("build", "--model", folder, "--mtp", tmp_path / "a.gguf", code=1)
    assert line.startswith(f"--mtp {tmp_path / 'a.gguf'}: architecture llama: only eagle3,")


TRUNKS = [("qwen3", dialect) for dialect in DIALECTS]
TRUNKS += [("llama", "eagle"), ("qwen3.5", "speculators"), ("gigachat", "eagle")]


@pytest.mark.parametrize(("name", "dialect"), TRUNKS)
def test_drafts_are_those_of_a_recompute(name: str, dialect: str, tmp_path: Path) -> None:
    model, reference = load_with_head(tmp_path, name, dialect)
    plan = Plan(reference.config, 3, "mtp-eagle", 1, 200, CHUNK, draft_ids=model.config.draft_ids)
    check_steps(plan, model, reference, accepts_all=False)


def shift_taps(model: CausalLM) -> None:
    model.taps = tuple(min(tap + 1, 2) for tap in model.taps)


def flip_residual(model: CausalLM) -> None:
    head: Any = model.module(0)
    head.config = replace(head.config, norm_before_residual=not head.config.norm_before_residual)


def take_ids_for_differences(model: CausalLM) -> None:
    ids = model.draft_ids
    model.draft_ids = ids - torch.arange(len(ids))


def recycle_normed(model: CausalLM) -> None:
    head: Any = model.module(0)
    head.config = replace(head.config, norm_output=not head.config.norm_output)


FAULTS = shift_taps, flip_residual, take_ids_for_differences, recycle_normed


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: Callable[[CausalLM], None], tmp_path: Path) -> None:
    model, reference = load_with_head(tmp_path, "qwen3", "eagle")
    fault(model)
    plan = Plan(reference.config, 3, "mtp-eagle", 1, 200, CHUNK, draft_ids=model.config.draft_ids)
    with pytest.raises(AssertionError, match="drafts differ"):
        check_steps(plan, model, reference, accepts_all=False)


REFUSALS = [
    (("--tp", "2", "--target", "inductor"), "--tp 2: an engine with an EAGLE-3 head has one rank"),
    (("--drafter", "mtp-vanilla"), "--drafter mtp-vanilla: an EAGLE-3 head drafts by mtp-eagle"),
    (("--draft-vocab", "9"), "--draft-vocab is for MTP modules, not for an EAGLE-3 head: leave"),
    (("--layers", "0-0"), "--layers 0-0: an EAGLE-3 head reads layers of the whole model"),
    (("--target", "tensorrt"), "has no GPU kernel yet: build for the CPU"),
]


@pytest.mark.parametrize(("flags", "why"), REFUSALS)
def test_refusals(flags: tuple[str, ...], why: str, tmp_path: Path) -> None:
    trunk = make_family("qwen3")
    folder = save_family(tmp_path / "qwen3", "qwen3", trunk)
    save_head(tmp_path / "head", "eagle", trunk)
    command = ("build", "--model", folder, "--nextn", 1, "--mtp", tmp_path / "head", "--dry-run")
    assert why in refusal(*command, *flags)


BAD: list[tuple[Change, str]] = [
    ({"hidden_size": 20}, "hidden_size 20 is not the trunk's 24, so it needs its own embed_tokens"),
    ({"target_hidden_size": 99}, "its trunk has hidden_size 99, the model 24"),
    ({"vocab_size": 62}, "its trunk has vocab_size 62, the model 61: this head is another model's"),
    ({TAPS: [0, 1, 7]}, "[0, 1, 7]: the trunk has 2 layers"),
    ({TAPS: "all"}, "must be a list of layers, not 'all'"),
    ({"draft_vocab_size": 44}, "d2t does not name 44 tokens"),
    ({"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported; supported: 1"),
    ({"layer_types": 5, "num_hidden_layers": 3}, "num_hidden_layers 3 is not supported"),
    ({"layer_types": ["sliding_attention"]}, "a head with a sliding window is not supported"),
]


@pytest.mark.parametrize(("changes", "why"), BAD)
def test_heads_that_do_not_fit(changes: Change, why: str, tmp_path: Path) -> None:
    trunk = make_family("qwen3")
    folder = save_family(tmp_path / "qwen3", "qwen3", trunk)
    save_head(tmp_path / "head", "eagle", trunk)
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=re.escape(why)):
        read_head_config(tmp_path / "head", folder, load_config(folder))


@pytest.mark.full
@pytest.mark.parametrize(("name", "dialect"), [("qwen3", "eagle"), ("qwen3.5", "speculators")])
def test_engines_are_exact(name: str, dialect: str, tmp_path: Path) -> None:
    """With int8 weights and caches all that is said is, to the bit, what is said without drafts."""
    sizes = {"hidden_size": 64}
    trunk = make_family(name, **sizes)
    folder = save_family(tmp_path / name, name, trunk, **sizes)
    save_head(tmp_path / "head", dialect, trunk)
    said = []
    for nextn, mtp in ((0, None), (3, tmp_path / "head")):
        out = tmp_path / f"n{nextn}"
        how = {"weights": "int8", "cache_dtype": "int8", "mtp": mtp, "out": out}
        build(build_request(folder, (nextn,), **how))
        with Engine.load(out, prefix_cache=False) as engine:
            params = SamplingParams(max_tokens=40, logprobs=0, ignore_eos=True)
            results = [engine.generate([5, 6, 7 + i], params) for i in range(3)]
            said.append([(r.token_ids, r.logprobs) for r in results])
    assert said[0] == said[1]
    with pytest.raises(UsageError, match="an EAGLE-3 head is not refitted: build the engine anew"):
        refit(tmp_path / "n3", str(folder), mtp=tmp_path / "head")
