"""DeepSeek-V4: the trunk against transformers', the MTP module against the plain model."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtpbuild.builder.compiler.quantize import QuantizeRequest
from mtpbuild.builder.models import load_config
from mtpbuild.builder.models.deepseek_v4.config import DeepseekV4Config
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.plan.recipe import FoundModel
from mtpbuild.builder.program.accept import MixedAcceptance
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.builder.weights.head import open_slice
from mtpbuild.builder.weights.scheme import add_calibration, make_scheme
from mtpbuild.lab.verify.distribution import compute_chi_square_p_value, fit_prefixes
from mtpbuild.plugins.compressed_attention import op
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.errors import CheckpointError, UsageError
from tests.reference.eager import EagerPrograms
from tests.support.deepseek_v4 import BLOCKS, draft_in_chain, load_plain, save, store_experts_in_fp4
from tests.support.invoke import refusal
from tests.support.known_text import take_steps
from tests.support.opened import load_model
from tests.support.requests import build, build_request, plan_model, quantize

NEXTN, CHUNK, HEAT = 3, 23, 0.7
FULL = pytest.mark.full
SPELLINGS: list[dict[str, Any]] = [
    {"heavy": 16},
    {"heavy": 16, "yarn": False},
    {"heavy": 128, "native": True},
    {"heavy": 128, "native": True, "yarn": False},
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("spelling", SPELLINGS)
@torch.no_grad()
def test_the_plain_model_is_transformers(spelling: dict[str, Any], tmp_path: Path) -> None:
    trunk = save(tmp_path, **spelling)
    plain, tokens = load_plain(tmp_path), torch.randint(0, 60, (2, 150))
    wanted = trunk(tokens).logits.log_softmax(-1)
    logprobs = plain.logits(plain.main(tokens)).log_softmax(-1)
    torch.testing.assert_close(logprobs, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spelling", SPELLINGS[1:3])
@torch.no_grad()
def test_chunks_are_the_plain_model(spelling: dict[str, Any], tmp_path: Path) -> None:
    """Of any sizes, with rows that close within a chunk, at its end, and over many chunks."""
    save(tmp_path, **spelling)
    plain, model = load_plain(tmp_path), load_model(tmp_path, load_config(tmp_path))
    plan = Plan(model.config, 0, None, 1, 400, 64)
    programs, rng = EagerPrograms(plan, model), np.random.default_rng(0)
    tokens, state, start = torch.randint(0, 60, (1, 300)), programs.tensors, 0
    wanted = plain.logits(plain.main(tokens)).log_softmax(-1)
    while start < 300:
        chunk = tokens[:, start : start + int(rng.integers(1, 64))]
        rows = model.rope(torch.tensor([start]), chunk.shape[1])
        hidden, updates = model(chunk, state, rows)
        state = state | updates.after(torch.tensor([chunk.shape[1]]))
        end = start + chunk.shape[1]
        logprobs = model.logits(hidden).log_softmax(-1)
        torch.testing.assert_close(logprobs, wanted[:, start:end], atol=2e-4, rtol=1e-3)
        start = end


@torch.no_grad()
def continue_plainly(plain: Any, tokens: list[int], count: int) -> list[int]:
    for _ in range(count):
        logits = plain.logits(plain.main(torch.tensor([tokens])))
        tokens = [*tokens, int(logits[0, -1].argmax())]
    return tokens[-count:]


@torch.no_grad()
def check_drafts(
    model: Any,
    plain: Any,
    steps: int = 9,
    drafter: str = "mtp-eagle",
    lengths: Sequence[int] = (2, 13, 45),
) -> None:
    """Check every step's tokens and drafts, with each number of accepted drafts.

    Rows of 4 tokens close at every place of a window, whose drafts are rejected at every place.
    """
    plan, rng = Plan(model.config, NEXTN, drafter, 1, 200, CHUNK), np.random.default_rng(0)
    draft = plain.draft_block if drafter == "mtp-block" else partial(draft_in_chain, plain)
    for length in lengths:
        prompt = rng.integers(0, 60, length).tolist()
        truth = continue_plainly(plain, prompt, steps * (NEXTN + 1))
        for tokens, drafts in take_steps(plan, model, prompt, truth, 60):
            wanted = [int(logits.argmax()) for logits in draft(tokens, NEXTN)]
            assert drafts == wanted, "drafts differ"


def test_drafts_are_the_plain_models(tmp_path: Path) -> None:
    save(tmp_path)
    check_drafts(load_model(tmp_path, load_config(tmp_path)), load_plain(tmp_path))


@pytest.mark.parametrize("lengths", [(5,), pytest.param((1, 2, 13, 45), marks=FULL)])
def test_a_block_is_the_plain_models(lengths: tuple[int, ...], tmp_path: Path) -> None:
    """DSpark's drafts, with a context of less and of more than a window."""
    save(tmp_path, stages=2, native=len(lengths) > 1)
    model, plain = load_model(tmp_path, load_config(tmp_path)), load_plain(tmp_path)
    check_drafts(model, plain, 4, "mtp-block", lengths)


def place_one_late(model: Any) -> None:
    """Give a block the angles of the places after its own."""
    head, rope = model.mtp[0], model.rope
    run = head.forward

    def late(x: Tensor, state: Any, rows: Any) -> Tensor:
        later = rope(rows.positions[:, 0] + 1, rows.positions.shape[1])
        return run(x, state, replace(rows, cos=later.cos, sin=later.sin))

    head.forward = late


def write_one_early(model: Any) -> None:
    head = model.mtp[0]
    write = head.write
    head.write = lambda context, *others: write(context.roll(-1, 1), *others)


def see_one_row_less(model: Any) -> None:
    for layer in model.mtp[0].layers:
        layer.self_attn.config = replace(layer.self_attn.config, sliding_window=7)


def bias_by_the_mask(model: Any) -> None:
    head = model.mtp[0]
    add = head.add_bias
    head.add_bias = lambda model, logits, token: add(model, logits, torch.full_like(token, 59))


OF_BLOCKS = place_one_late, write_one_early, see_one_row_less, bias_by_the_mask


@pytest.mark.parametrize("fault", [pytest.param(fault, marks=FULL) for fault in OF_BLOCKS])
def test_faults_of_blocks_are_seen(fault: Callable[[Any], None], tmp_path: Path) -> None:
    save(tmp_path, stages=2)
    model = load_model(tmp_path, load_config(tmp_path))
    fault(model)
    with pytest.raises(AssertionError, match="drafts differ"):
        check_drafts(model, load_plain(tmp_path), 4, "mtp-block", (13,))


def test_a_module_of_other_files(tmp_path: Path) -> None:
    """In DeepSeek's names, for a trunk in those of transformers."""
    save(tmp_path / "trunk", seed=1)
    save(tmp_path / "head", native=True)
    joined = open_slice(tmp_path / "trunk", None, tmp_path / "head")
    joined.check(load_config(tmp_path / "trunk"))
    trunk, head = (open_checkpoint(tmp_path / name) for name in ("trunk", "head"))
    for name in joined.tensors:
        wanted = (head if name.startswith("mtp.") else trunk).read(name)
        assert torch.equal(joined.read(name), wanted)
    assert not torch.equal(trunk.read("mtp.0.h_proj.weight"), head.read("mtp.0.h_proj.weight"))


def join_one_late(model: Any, patch: pytest.MonkeyPatch) -> None:
    module = model.module(0)
    combine = module.combine_inputs
    module.combine_inputs = lambda embedding, hidden, rows: combine(
        embedding, hidden.roll(1, 1), rows
    )


def leave_comb_as_it_is(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Mix the streams by comb's columns in place of its rows."""
    for mixer in (mixer for layer in model.layers for mixer in (layer.attn_hc, layer.ffn_hc)):
        weigh = mixer.forward

        def swapped(*operands: Any, weigh: Any = weigh) -> tuple[Tensor, Tensor, Tensor]:
            x, y, weights = weigh(*operands)
            comb = weights[..., 4:].unflatten(-1, (4, 4)).mT.flatten(-2)
            return x, y, torch.cat([weights[..., :4], comb], -1)

        mixer.forward = swapped


def see_open_rows(model: Any, patch: pytest.MonkeyPatch) -> None:
    seen = op.see_complete
    patch.setattr(op, "see_complete", lambda position, *sizes: seen(position + 1, *sizes))


FAULTS = join_one_late, leave_comb_as_it_is


@pytest.mark.parametrize("fault", [see_open_rows, *(pytest.param(f, marks=FULL) for f in FAULTS)])
def test_planted_faults_are_seen(
    fault: Callable[[Any, pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(tmp_path)
    model = load_model(tmp_path, load_config(tmp_path))
    fault(model, monkeypatch)
    with pytest.raises(AssertionError):
        check_drafts(model, load_plain(tmp_path))


ENGINES = [(NEXTN, 0), *(pytest.param(*case, marks=FULL) for case in ((0, 0), (5, 2), ("auto", 2)))]


@pytest.mark.parametrize(("nextn", "stages"), ENGINES)
@torch.no_grad()
def test_engines_continue_as_transformers(nextn: Any, stages: int, tmp_path: Path) -> None:
    """Prompts of 1 to 600 tokens, with and without drafts, from cached prefixes, in a batch."""
    trunk = save(tmp_path / "model", heavy=128, native=True, stages=stages)
    out = tmp_path / "engines"
    flags = {"max_seq_len": 700, "prefill_chunk": 64, "max_batch": 2}
    request = build_request(tmp_path / "model", (nextn,), out=out, **flags)
    prompts = [torch.randint(0, 60, (n,)).tolist() for n in (1, 5, 127, 128, 260, 600)]
    prompts.append(prompts[-1][:300] + prompts[0])
    settings = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=0)
    for built in build(request):
        with Engine.load(built.folder, threads=1) as engine:
            for prompt, answer in zip(prompts, engine.generate(prompts, settings), strict=True):
                tokens = torch.tensor([prompt + list(answer.token_ids)])
                logprobs = trunk(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                assert logprobs.argmax(-1).tolist() == list(answer.token_ids)
                told = torch.tensor([token.logprob for token in answer.logprobs or ()])
                torch.testing.assert_close(told, logprobs.amax(-1), atol=1e-4, rtol=1e-4)


@FULL
@pytest.mark.parametrize(("stages", "nextn"), [(0, 3), (2, 5)])
def test_bfloat16_caches_are_exact(stages: int, nextn: int, tmp_path: Path) -> None:
    """Texts and log-probabilities of any nextn, chunk and batch, and from cached prefixes."""
    save(tmp_path / "model", stages=stages, **BLOCKS)
    prompts = [torch.randint(0, 60, (n,)).tolist() for n in (1, 40, 131, 200)]
    prompts.append(prompts[-1][:150] + prompts[0])
    params = [
        SamplingParams(30, temperature=0.7 * (i % 2), seed=i, ignore_eos=True, logprobs=0)
        for i in range(len(prompts))
    ]
    said = []
    for drafts, chunk in ((0, 64), (nextn, 23)):
        flags: dict[str, Any] = {"weights": "int8", "cache_dtype": "bfloat16", "max_batch": 2}
        flags |= {"max_seq_len": 260, "prefill_chunk": chunk, "out": tmp_path / f"{drafts}"}
        (built,) = build(build_request(tmp_path / "model", (drafts,), **flags))
        with Engine.load(built.folder, threads=1) as engine:
            results = [engine.generate(prompts, params)]  # cold, then from what these leave
            results.append([engine.generate(*one) for one in zip(prompts, params, strict=True)])
        said += [[(r.token_ids, r.logprobs) for r in each] for each in results]
    assert all(each == said[0] for each in said)


@torch.no_grad()
def list_likely(
    plain: Any, prompt: list[int], count: int, text: tuple[int, ...] = (), p: float = 1.0
) -> dict[tuple[int, ...], float]:
    """Return the probabilities of the texts of up to 3 tokens that come up 5 times in `count`.

    text: their beginning, whose probability is p.
    """
    logits = plain.logits(plain.main(torch.tensor([[*prompt, *text]])))[0, -1]
    known = {(*text, i): p * q for i, q in enumerate((logits / HEAT).softmax(-1).tolist())}
    known = {longer: share for longer, share in known.items() if share * count >= 5}
    for longer, share in list(known.items()) if len(text) < 2 else ():
        known |= list_likely(plain, prompt, count, longer, share)
    return known


def record_the_first_for_all(patch: pytest.MonkeyPatch) -> None:
    choose = MixedAcceptance.choose

    def wrong(self: MixedAcceptance, logits: Tensor, k: int) -> Tensor:
        draft = choose(self, logits, k)
        self.probs[-1] = self.probs[0]
        return draft

    patch.setattr(MixedAcceptance, "choose", wrong)


@FULL
@pytest.mark.parametrize("fault", [None, record_the_first_for_all])
def test_a_rejected_block_leaves_the_models_distribution(
    fault: Callable[[pytest.MonkeyPatch], None] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a real engine that drafts by DSpark, against exact probabilities of the plain model."""
    save(tmp_path / "model", stages=2)
    if fault is not None:
        fault(monkeypatch)
    request = build_request(tmp_path / "model", (4,), out=tmp_path / "engine", max_batch=8)
    build(request)
    prompt, count = [7, 8, 9], 6000
    hot = SamplingParams(max_tokens=4, temperature=HEAT, ignore_eos=True, acceptance="rejection")
    known = list_likely(load_plain(tmp_path / "model"), prompt, count)
    with Engine.load(tmp_path / "engine", threads=1, prefix_cache=False) as engine:
        asked = [replace(hot, seed=seed) for seed in range(count)]
        results = engine.generate([prompt] * count, asked)
    fit = fit_prefixes([result.token_ids for result in results], known)
    p_value = compute_chi_square_p_value(fit.statistic, fit.freedom)
    assert (p_value > 1e-3) == (fault is None), p_value
    accepted = [r.metrics.speculative_decoding.num_accepted_draft_tokens for r in results]
    assert sum(accepted) > count / 10


@FULL
@pytest.mark.parametrize("stages", [0, 2])
def test_portable_engines_continue_plainly(stages: int, tmp_path: Path) -> None:
    """Standard operators say the same as the plain model."""
    save(tmp_path / "model", stages=stages)
    request = build_request(tmp_path / "model", (NEXTN,), out=tmp_path / "engine", portable=True)
    (built,) = build(request)
    prompt, plain = [7, 8, 9, 10, 11], load_plain(tmp_path / "model")
    with Engine.load(built.folder, threads=1) as engine:
        settings = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
        answer = engine.generate(prompt, settings)
    assert list(answer.token_ids) == continue_plainly(plain, prompt, 40)


@torch.no_grad()
def test_experts_stay_in_fp4(tmp_path: Path) -> None:
    """Published experts are held as they are; the kernels round what they multiply to int8."""
    save(tmp_path / "model", heavy=128, native=True, **BLOCKS)
    store_experts_in_fp4(tmp_path / "model")
    plain = load_plain(tmp_path / "model")  # it has the codes' numbers
    request = build_request(tmp_path / "model", (0,), out=tmp_path / "engines", max_seq_len=256)
    settings = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True, logprobs=0)
    (built,) = build(request)
    with Engine.load(built.folder, threads=1) as engine:
        assert engine.manifest.build.weights == "mxfp4"
        for prompt in ([7], torch.randint(0, 60, (140,)).tolist()):
            answer = engine.generate(prompt, settings)
            tokens = torch.tensor([prompt + list(answer.token_ids)])
            logits = plain.logits(plain.main(tokens))[0, len(prompt) - 1 : -1]
            wanted = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
            told = torch.tensor([token.logprob for token in answer.logprobs or ()])
            assert (told - wanted).abs().mean() < 0.05


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"compress_ratios": [0, 4, 3, 4]}, "compress_ratios: 3 tokens in a row"),
    ({"compress_ratios": [0, 0, 0, 0]}, "an engine needs a layer with compressed rows"),
    ({"compress_ratios": [0, 4]}, "compress_ratios must be a list of 4 numbers or more"),
    ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 must be even"),
    ({"qk_rope_head_dim": None, "partial_rotary_factor": 1, "head_dim": "16"}, "head_dim must be"),
    ({"qk_rope_head_dim": None, "partial_rotary_factor": 1e308}, "within a head's 16 numbers"),
    ({"qk_rope_head_dim": None, "partial_rotary_factor": "all"}, "partial_rotary_factor must be"),
    ({"index_head_dim": 6}, "index_head_dim 6 is below qk_rope_head_dim 8"),
    ({"o_groups": 3}, "num_attention_heads 4 must be a multiple of o_groups 3"),
    ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
    ({"rope_scaling": [1]}, "must be an object"),
]


@pytest.mark.parametrize(("changes", "why"), WRONG)
def test_configurations_that_are_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    save(tmp_path, heavy=128, native=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(CheckpointError, match=why):
        DeepseekV4Config.parse(raw | changes)


WRONG_HEADS: list[tuple[dict[str, Any], str]] = [
    ({"dspark_target_layer_ids": [4]}, "dspark_target_layer_ids must be a list of layers up to 3"),
    ({"dspark_noise_token_id": 60}, "dspark_noise_token_id must be an integer of 0..59"),
    ({"dspark_block_size": None}, "dspark_block_size is missing"),
    ({"dspark_markov_head_type": "rnn"}, "dspark_markov_head_type 'rnn' is not supported"),
    ({"dspark_window_size": 9}, "dspark_window_size 9 is not supported; supported: 8"),
]


def test_heads_that_are_refused(tmp_path: Path) -> None:
    save(tmp_path, stages=1)
    raw = json.loads((tmp_path / "config.json").read_text())
    for changes, why in WRONG_HEADS:
        (tmp_path / "config.json").write_text(json.dumps(raw | changes))
        with pytest.raises(CheckpointError, match=why):
            load_config(tmp_path)


INT8, INDUCTOR = ("--weights", "int8"), ("--target", "inductor")
NOT_BUILT: dict[int, list[tuple[tuple[str, ...], str]]] = {
    0: [
        ((*INT8, "--cache-dtype", "int8"), "has cache rows that can't be int8: use bfloat16"),
        ((*INDUCTOR, "--tp", "2"), "--tp 2 does not divide the number of ranks of an engine of"),
        (("--layers", "0-0"), "--layers 0-0 has no layer with compressed rows, which an engine"),
    ],
    2: [
        ((*INDUCTOR, "--tp", "2"), "--tp 2: an engine with a DSpark head has one rank"),
        ((*INDUCTOR, "--device", "cuda"), "a DSpark head has no GPU kernel yet: build for the CPU"),
        (("--draft-vocab", "9"), "--draft-vocab is for MTP modules, not for a DSpark head: leave"),
    ],
}


@pytest.mark.parametrize("stages", NOT_BUILT)
def test_what_is_not_built_is_refused(stages: int, tmp_path: Path) -> None:
    save(tmp_path, stages=stages)
    for flags, why in NOT_BUILT[stages]:
        assert why in refusal("build", "--model", tmp_path, "--dry-run", *flags)


def test_a_module_does_not_replace_a_dspark_head(tmp_path: Path) -> None:
    for name, stages in (("trunk", 2), ("head", 0)):
        save(tmp_path / name, stages=stages)
    line = refusal("build", "--model", tmp_path / "trunk", "--mtp", tmp_path / "head", code=1)
    assert "MTP modules can't replace a DSpark head, which the model has: leave --mtp out" in line


def test_calibration_is_refused_without_weights(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    scheme = add_calibration(make_scheme("int4", None, None), True, None)
    request = build_request(tmp_path, (0,), out=tmp_path / "engines", scheme=scheme)
    with pytest.raises(UsageError, match="its layers can't run one by one"):
        plan_model(request, FoundModel("x", "x", tmp_path))
    quantising = QuantizeRequest(str(tmp_path), scheme, tmp_path / "int4")
    with pytest.raises(UsageError, match="its layers can't run one by one"):
        quantize(quantising)
