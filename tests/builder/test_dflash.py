"""DFlash and DSpark heads: every step's drafts against a recompute, and planted faults."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mtpbuild.builder.checkpoint.config import RopeConfig
from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.models import load_config
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.layers import Positions, Rope
from mtpbuild.builder.models.common.plain import PlainCausalLM
from mtpbuild.builder.models.common.weight import convert_weights, join_slices
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.plan.recipe import FoundModel
from mtpbuild.builder.program.opened_model import open_model
from mtpbuild.builder.weights.head import open_head, read_head_config
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.errors import CheckpointError
from tests.reference.dflash import MASK, SIZES, SLIDING, PlainBlockHead, make_head
from tests.reference.eager import EagerPrograms
from tests.reference.sampling import plain_text
from tests.support.dflash_gguf import write_gguf_head
from tests.support.families import make_family, save_family
from tests.support.forced import Run
from tests.support.invoke import refusal
from tests.support.opened import NO_IDS
from tests.support.requests import build, build_request
from tests.support.steps import CHUNK, check_state, check_steps

Change = dict[str, Any]
TAPS = {"target_layer_ids": [0], "mask_token_id": MASK}
WINDOW = {
    "layer_types": [SLIDING, "full_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
}
FORMS: dict[str, Change] = {
    "dflash": {"block_size": 6},
    "windows": {"block_size": 6, **WINDOW},
    "dspark": {"block_size": 5, "markov_rank": 6},
}
CLASSES = {"dspark": "Qwen3DSparkModel"}
FULL = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def save_head(
    folder: Path, form: str, trunk: PlainCausalLM, changes: Change | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write a head as its makers do; return its values and its weights."""
    raw: dict[str, Any] = SIZES | {"hidden_size": trunk.config.hidden_size} | FORMS[form]
    raw |= {"dflash_config": TAPS} | (changes or {})
    raw["architectures"] = [CLASSES.get(form, "DFlashDraftModel")]
    folder.mkdir(parents=True)
    weights = make_head(trunk, raw)
    copies = {"lm_head.weight": trunk.lm_head.weight.data.clone()} if form == "dspark" else {}
    save_file(weights | copies, folder / "model.safetensors")
    # DeepSpec's have all values at the top.
    stored = raw | {"dflash_config": None} | TAPS if form == "dspark" else raw
    (folder / "config.json").write_text(json.dumps(stored))
    return raw, weights


def load_with_head(place: Path, name: str, form: str) -> tuple[CausalLM, PlainBlockHead]:
    """Return the program's model of a trunk with a head, and the plain one."""
    trunk = make_family(name)
    folder = save_family(place / name, name, trunk)
    raw, weights = save_head(place / "head", form, trunk)
    config = read_head_config(place / "head", folder, load_config(folder))
    source = FoundModel("x", "x", folder, place / "head")
    model = open_model(source, config, NO_IDS, GraphStyle())
    values = dict(join_slices(convert_weights(model.checkpoint, model.table)))
    model.model.load_state_dict(values, assign=True, strict=True)
    return model.model.eval(), PlainBlockHead(trunk, config, raw, weights)


def make_plan(model: CausalLM, nextn: int, *, adaptive: bool = False) -> Plan:
    return Plan(model.config, nextn, "mtp-block", 1, 200, CHUNK, adaptive=adaptive)


def check(model: CausalLM, reference: PlainBlockHead, nextn: int) -> None:
    """Check a prompt of three chunks and steps that accept any number of drafts."""
    rng, plan = np.random.default_rng(0), make_plan(model, nextn)
    programs = EagerPrograms(plan, model)
    run = Run(programs, reference, nextn, plan.drafter, CHUNK, rng)
    tokens, seen = run.steps(rng.integers(0, 61, 11).tolist(), 8)
    assert len(seen.accepted) > 2
    check_state(programs, reference, tokens)


CASES = [("qwen3.5", "dspark", 3), ("qwen3", "windows", 3)]


@pytest.mark.parametrize(("name", "form", "nextn"), CASES)
def test_drafts_are_those_of_a_recompute(name: str, form: str, nextn: int, tmp_path: Path) -> None:
    check(*load_with_head(tmp_path, name, form), nextn)


ALL = [
    ("qwen3.5", "dspark", 5), ("qwen3.5", "dflash", 5), ("qwen3.5", "windows", 2),
    ("qwen3", "windows", 3), ("qwen3", "dspark", 1), ("gigachat", "dflash", 1),
    ("llama", "dspark", 2),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("name", "form", "nextn"), ALL)
def test_drafts_of_all_lengths(
    name: str, form: str, nextn: int, adaptive: bool, tmp_path: Path
) -> None:
    """With each number of accepted drafts; the head's rows are those of a fresh prompt."""
    model, reference = load_with_head(tmp_path, name, form)
    check_steps(make_plan(model, nextn, adaptive=adaptive), model, reference, accepts_all=False)


def shift(rows: Positions) -> Positions:
    place = Rope(RopeConfig(theta=SIZES["rope_theta"]), 2 * rows.cos.shape[-1])
    later = place(rows.positions[:, 0] + 1, rows.positions.shape[1])
    return replace(rows, cos=later.cos, sin=later.sin)


def draft_one_late(model: CausalLM) -> None:
    """Give the block the positions after its own."""
    head: Any = model.mtp[0]
    head.register_forward_pre_hook(lambda _, given: (*given[:2], shift(given[2])))


def write_one_early(model: CausalLM) -> None:
    """Write each token's row at the place before its own."""
    head: Any = model.mtp[0]
    write = head.write
    head.write = lambda context, *others: write(context.roll(-1, 1), *others)


def take_the_first_for_all(model: CausalLM) -> None:
    """Bias all drafts by the newest token."""
    head: Any = model.mtp[0]
    add, first = head.add_bias, list[Tensor]()

    def biased(model: CausalLM, logits: Tensor, token: Tensor) -> Tensor:
        first.append(token)
        return add(model, logits, first[-(len(first) % 3 or 3)])  # of this step's three

    head.add_bias = biased


def see_no_masks(model: CausalLM) -> None:
    head: Any = model.mtp[0]
    head.causal = [True] * len(head.causal)


FAULTS: dict[Callable[[CausalLM], None], str] = {
    draft_one_late: "dflash", write_one_early: "dflash", see_no_masks: "dflash",
    take_the_first_for_all: "dspark",
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: Callable[[CausalLM], None], tmp_path: Path) -> None:
    model, reference = load_with_head(tmp_path, "qwen3", FAULTS[fault])
    fault(model)
    with pytest.raises(AssertionError, match="drafts differ"):
        check(model, reference, 3)


BAD: list[tuple[Change, str]] = [
    ({"architectures": ["DFlash2DraftModel"]}, "DFlash2 heads, with convolutions and a candidate"),
    ({"hidden_size": 20}, "its trunk has hidden_size 20, the model 24"),
    ({"vocab_size": 62}, "its trunk has vocab_size 62, the model 61: this head is another model's"),
    ({"num_target_layers": 9}, "its trunk has num_target_layers 9, the model 2"),
    ({"dflash_config": TAPS | {"target_layer_ids": [1]}}, "must be a list of layers up to 0, not"),
    ({"dflash_config": TAPS | {"target_layer_ids": []}}, "target_layer_ids is missing"),
    ({"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id is missing"),
    ({"dflash_config": TAPS | {"mask_token_id": 61}}, "mask_token_id must be an integer of 0..60"),
    ({"block_size": 1}, "block_size must be an integer of 2.."),
    ({"markov_head_type": "rnn"}, "markov_head_type 'rnn' is not supported"),
    ({"draft_vocab_size": 9}, "a draft vocabulary is not supported"),
    ({"layer_types": [SLIDING] * 2}, "but use_sliding_window is false"),
    (WINDOW | {"sliding_window": 4}, "sliding_window 4 is below block_size 6"),
    (WINDOW | {"is_causal": False}, "a sliding window that is not causal is not supported"),
    ({"layer_types": ["linear"]}, "layer_types must be a list of 2 names"),
]


@pytest.mark.parametrize(("changes", "why"), BAD)
def test_heads_that_do_not_fit(changes: Change, why: str, tmp_path: Path) -> None:
    trunk = make_family("qwen3")
    folder = save_family(tmp_path / "qwen3", "qwen3", trunk)
    save_head(tmp_path / "head", "dflash", trunk)
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=re.escape(why)):
        read_head_config(tmp_path / "head", folder, load_config(folder))


REFUSALS = [
    (("--tp", "2", "--target", "inductor"), "--tp 2: an engine with a DFlash or DSpark head has"),
    (("--drafter", "mtp-eagle"), "a DFlash or DSpark head drafts by mtp-block"),
    (("--nextn", "6"), "--nextn 6: a block of this head has at most 5 drafts"),
    (("--target", "tensorrt"), "has no GPU kernel yet: build for the CPU"),
]


@pytest.mark.parametrize(("flags", "why"), REFUSALS)
def test_refusals(flags: tuple[str, ...], why: str, tmp_path: Path) -> None:
    trunk = make_family("qwen3")
    folder = save_family(tmp_path / "qwen3", "qwen3", trunk)
    save_head(tmp_path / "head", "dflash", trunk)
    assert why in refusal(
        "build", "--model", folder, "--mtp", tmp_path / "head", "--dry-run", *flags
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_gguf_head_is_the_one_that_it_was_made_from(form: str, tmp_path: Path) -> None:
    """In its configuration and its weights, to the bit."""
    trunk = make_family("qwen3")
    folder = save_family(tmp_path / "qwen3", "qwen3", trunk)
    eps = {"rms_norm_eps": 2**-17}  # a file has it in fp32
    file = write_gguf_head(tmp_path / "a.gguf", *save_head(tmp_path / "head", form, trunk, eps))
    config, places = load_config(folder), (tmp_path / "head", file)
    first, second = (read_head_config(place, folder, config) for place in places)
    assert first == second
    wanted, read = (open_head(place, config) for place in places)
    assert wanted.tensors.keys() == read.tensors.keys()
    for name in wanted.tensors:
        assert torch.equal(wanted.read(name), read.read(name)), name


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("conv_kernel_size", "DFlash2 heads, with convolutions"),
        ("logit_scale", "output_multiplier 2 is not supported"),
        ("hyper_connection.count", "no key dflash.expert_gating_func"),
        ("sample_from_anchor", "sample_from_anchor must be true or false, not 2"),
    ],
)
def test_wrong_gguf_heads(key: str, why: str, tmp_path: Path) -> None:
    trunk = make_family("qwen3")
    folder = save_family(tmp_path / "qwen3", "qwen3", trunk)
    raw, weights = save_head(tmp_path / "head", "dflash", trunk)
    file = write_gguf_head(
        tmp_path / "a.gguf", raw, weights, lambda file: file.add_uint32(f"dflash.{key}", 2)
    )
    with pytest.raises(CheckpointError, match=re.escape(why)):
        read_head_config(file, folder, load_config(folder))


def test_a_block_needs_its_head(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "qwen3.5", "qwen3.5", make_family("qwen3.5"))
    line = refusal("build", "--model", folder, "--drafter", "mtp-block", "--dry-run")
    assert line == "--drafter mtp-block: join a DFlash or DSpark head with --mtp"


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "form"), [("qwen3", "windows"), ("qwen3.5", "dflash"), ("qwen3.5", "dspark")]
)
def test_engines_are_exact(name: str, form: str, tmp_path: Path) -> None:
    """With int8 weights and caches all that is said is, to the bit, what is said without drafts."""
    sizes = {"hidden_size": 64}
    trunk = make_family(name, **sizes)
    folder = save_family(tmp_path / name, name, trunk, **sizes)
    save_head(tmp_path / "head", form, trunk)
    said = []
    for nextn, mtp in ((0, None), (3, tmp_path / "head"), ("auto", tmp_path / "head")):
        out = tmp_path / f"n{nextn}"
        how = {"weights": "int8", "cache_dtype": "int8", "mtp": mtp, "out": out}
        build(build_request(folder, (nextn,), **how))
        with Engine.load(out, prefix_cache=False) as engine:
            params = SamplingParams(max_tokens=40, logprobs=0, ignore_eos=True)
            results = [engine.generate([5, 6, 7 + i], params) for i in range(3)]
            said.append([(r.token_ids, r.logprobs) for r in results])
    assert said[0] == said[1] == said[2]


@pytest.mark.full
@pytest.mark.parametrize("form", ["dflash", "dspark"])
def test_sampled_text_is_what_plain_sampling_gives(form: str, tmp_path: Path) -> None:
    """Drafts are drawn from their own distributions, DSpark's given the draft before."""
    trunk = make_family("qwen3")
    folder = save_family(tmp_path / "qwen3", "qwen3", trunk)
    save_head(tmp_path / "head", form, trunk)
    build(build_request(folder, (3,), mtp=tmp_path / "head", out=tmp_path / "engine"))
    hot = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, top_p=0.95, seed=5)
    with Engine.load(tmp_path / "engine", threads=1) as engine:
        for params in (hot, replace(hot, temperature=1.3, top_k=9, draft_sample_method="greedy")):
            for prompt in ([7], [9, 30, 31, 50, 12, 44]):
                result = engine.generate(prompt, params)
                assert result.token_ids == plain_text(trunk, prompt, params)
                assert result.metrics.speculative_decoding.num_draft_tokens
