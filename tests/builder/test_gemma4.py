"""Gemma-4 and its assistant: texts, log-probabilities and drafts against transformers'."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mtpbuild.builder.models import find_family_of, load_config
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.gemma4.config import Gemma4Config
from mtpbuild.builder.plan.plan import Plan, count_state_bytes, make_state_specs
from mtpbuild.builder.plan.recipe import find_recipe
from mtpbuild.builder.plan.weight_classes import count_classes, find_layout, load_recipe_config
from mtpbuild.builder.weights.files import list_entries, open_checkpoint
from mtpbuild.builder.weights.head import read_head_config
from mtpbuild.runtime import Engine, Result, SamplingParams
from mtpbuild.runtime.contract.manifest import WEIGHTS, read_manifest
from mtpbuild.runtime.contract.state import CACHED, StateSpec
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.ranks import ALONE
from tests.support.exact_engines import HEAD
from tests.support.exact_engines import save as save_exact
from tests.support.gemma4 import (
    SHAPES,
    Generator,
    Head,
    Trunk,
    continue_greedily,
    draft,
    make_assistant,
    make_multimodal,
    make_trunk,
    open_saved,
    place_one_off,
    read_unnormed,
    save,
)
from tests.support.known_text import take_steps
from tests.support.requests import build, build_request

NEXTN, CHUNK = 3, 7
TIE = 1e-3  # logits nearer than this may be ranked either way


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load_plain(folder: Path) -> Any:
    """Return the plain model of a checkpoint, whose tensors fit the family's table."""
    config, checkpoint = load_config(folder), open_checkpoint(folder)
    checkpoint.check(config)
    plain = find_family_of(config).reference(config)
    names = plain.state_dict().keys() - {"lm_head.weight"}
    plain.load_state_dict({name: checkpoint.read(name) for name in names}, strict=False)
    return plain


@pytest.mark.parametrize("shape", SHAPES)
def test_the_plain_model_is_transformers(shape: str, tmp_path: Path) -> None:
    trunk = make_trunk(shape)
    plain, tokens = load_plain(save(trunk, tmp_path)), torch.randint(3, 60, (2, 30))
    with torch.no_grad():
        wanted = trunk(tokens).logits
        torch.testing.assert_close(plain.logits(plain.main(tokens)), wanted, atol=1e-4, rtol=1e-4)


def test_the_published_spelling_of_sizes(tmp_path: Path) -> None:
    config = load_config(save(make_trunk("dense"), tmp_path))
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    del raw["per_layer_config"]
    raw |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    vision = {"model_type": "gemma4", "text_config": raw, "vision_config": {"hidden_size": 8}}
    path.write_text(json.dumps(vision | {"architectures": ["Gemma4ForConditionalGeneration"]}))
    assert load_config(tmp_path) == config


@pytest.mark.parametrize("unified", [False, True])
def test_towers_are_left_out(unified: bool, tmp_path: Path) -> None:
    model = make_multimodal(unified)
    assert open_checkpoint(save(model, tmp_path)).tower > 5
    plain = load_plain(tmp_path)
    tokens = torch.randint(3, 60, (1, 20))
    with torch.no_grad():
        wanted = model(input_ids=tokens).logits
        torch.testing.assert_close(plain.logits(plain.main(tokens)), wanted, atol=1e-4, rtol=1e-4)


def test_layers_of_one_size(tmp_path: Path) -> None:
    """As transformers writes them, without a size of the layers that see all rows."""
    trunk = make_trunk("dense", global_head_dim=6, num_global_key_value_heads=None)
    config: Any = load_config(save(trunk, tmp_path))
    assert (config.global_head_dim, config.num_global_key_value_heads) == (6, 2)
    open_checkpoint(tmp_path).check(config)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_kv_shared_layers": 36}, "no layer before them has rows that they could read"),
    ({"per_layer_config": {}, "layer_types": -1}, "layer_types must be a list of 35 names"),
    ({"per_layer_config": {}, "layer_types": [[]] * 35}, "layer_types must be a list of 35 names"),
    ({"per_layer_config": {"4": {"head_dim": 8}}}, "layers of one kind with different sizes"),
    ({"rope_parameters": {"full_attention": 5}}, "must hold an object for each kind of layers"),
    ({"use_bidirectional_attention": "all"}, "text that sees later tokens"),
]


@pytest.mark.parametrize(("changes", "why"), WRONG)
def test_configurations_that_are_refused(changes: dict[str, Any], why: str) -> None:
    recipe = find_recipe("gemma-4-e2b")
    assert recipe is not None
    raw = json.loads((recipe.config_folder / "config.json").read_text())["text_config"]
    with pytest.raises(CheckpointError, match=why):
        Gemma4Config.parse(raw | changes)


def load(shape: str, place: Path, *, balanced: bool = False) -> tuple[CausalLM, Trunk, Head]:
    """Return the program's model with its head, and transformers'.

    balanced: whether its keys are, some of which are much larger than others.
    """
    trunk, head = make_trunk(shape), make_assistant(shape)
    if balanced:
        for name, weight in trunk.named_parameters():
            if name.endswith("k_norm.weight"):
                weight.data[1 :: len(weight) // 2] *= 20
    return open_saved(trunk, head, place, balanced=balanced), trunk, head


def check_drafts(model: CausalLM, trunk: Trunk, head: Head, steps: int = 9) -> None:
    """Check every step's tokens and drafts, with each number of accepted drafts."""
    plan, rng = Plan(model.config, NEXTN, "mtp-assistant", 1, 200, CHUNK), np.random.default_rng(0)
    for length in (2, 4, 19):
        prompt = rng.integers(3, 60, length).tolist()
        truth = continue_greedily(trunk, prompt, steps * (NEXTN + 1))
        for tokens, drafts in take_steps(plan, model, prompt, truth, 60):
            compare(drafts, draft(trunk, head, tokens, NEXTN))


def compare(drafts: list[int], wanted: list[Tensor]) -> None:
    for token, logits in zip(drafts, wanted, strict=True):
        if token != int(logits.argmax()):
            assert logits.max() - logits[token] < TIE, "drafts differ"
            return


@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_are_transformers(shape: str, tmp_path: Path) -> None:
    check_drafts(*load(shape, tmp_path))


@pytest.mark.parametrize("shape", ["dense", "small"])
def test_balanced_keys_change_no_draft(shape: str, tmp_path: Path) -> None:
    """Layers that read others' rows, the head's too, have the powers of those."""
    model, trunk, head = load(shape, tmp_path, balanced=True)
    for layer in range(3):
        weight: Tensor = model.get_parameter(f"layers.{layer}.self_attn.k_norm.weight")
        assert weight.max() < 10 * weight.median()
    check_drafts(model, trunk, head)


def see_all_rows(model: Any) -> None:
    place = model.place_head
    model.place_head = lambda rows, lengths, last, active: place(
        rows, lengths, torch.full_like(last, NEXTN), active
    )


def recycle_normed(model: Any) -> None:
    run = model.run_head

    def run_once(embedding: Tensor, hidden: Tensor, rows: Any) -> tuple[Tensor, Tensor]:
        x, _ = run(embedding, hidden, rows)
        return x, hidden

    model.run_head = run_once


@pytest.mark.parametrize("fault", [place_one_off, see_all_rows, read_unnormed, recycle_normed])
def test_planted_faults_are_seen(fault: Callable[[Any], None], tmp_path: Path) -> None:
    model, trunk, head = load("dense", tmp_path)
    fault(model)
    with pytest.raises(AssertionError, match="drafts differ"):
        check_drafts(model, trunk, head)


@pytest.mark.parametrize(
    "shape", ["dense", *(pytest.param(s, marks=pytest.mark.full) for s in ("mixture", "small"))]
)
def test_engines_continue_as_transformers(shape: str, tmp_path: Path) -> None:
    trunk, head = make_trunk(shape), make_assistant(shape)
    folder, assistant = save(trunk, tmp_path / "trunk"), save(head, tmp_path / "head")
    out = tmp_path / "engines"
    # Rings of 256 rows, which begin anew in the longest prompt.
    request = build_request(
        folder, (0, NEXTN), out=out, mtp=assistant, max_seq_len=360, prefill_chunk=50
    )
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0)
    for built in build(request):
        with Engine.load(built.folder) as engine:
            for length in (1, 3, 5, 6, 40, 300):
                rng = np.random.default_rng(length)
                prompt = rng.integers(3, 60, length).tolist()
                result = engine.generate(prompt, params)
                wanted = continue_greedily(trunk, prompt, 40)
                assert [*result.token_ids] == wanted
                with torch.no_grad():
                    logits = trunk(torch.tensor([prompt + wanted])).logits[0, length - 1 : -1]
                logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(wanted)[:, None])[:, 0]
                measured = [step.logprob for step in result.logprobs]
                np.testing.assert_allclose(measured, logprobs, atol=1e-4)


# What is published: billions of parameters, those of the second embedding, and of the assistant.
PUBLISHED = {
    "gemma-4-e2b": (4.65, 2.349, 0.08),
    "gemma-4-e4b": (7.5, 2.819, 0.09),
    "gemma-4-12b": (11.8, 0.0, 0.42),
    "gemma-4-26b-a4b": (25.2, 0.0, 0.42),
    "gemma-4-31b": (30.7, 0.0, 0.45),
}


def count_layer(c: dict[str, Any], index: int) -> int:
    """Count a trunk's layer by its config.json, without its factor, norms and scales."""
    E, heads, shared = c["hidden_size"], c["num_attention_heads"], c["num_kv_shared_layers"]
    full = c["layer_types"][index] == "full_attention"
    width = c["global_head_dim"] if full else c["head_dim"]
    groups = c["num_key_value_heads"]
    if full and c["attention_k_eq_v"]:
        groups = c["num_global_key_value_heads"]
    owns = index < c["num_hidden_layers"] - shared
    kept = (1 if full and c["attention_k_eq_v"] else 2) * groups if owns else 0
    inner = c["intermediate_size"] * (2 if c["use_double_wide_mlp"] and not owns else 1)
    experts = (c["num_experts"] or 0) * (3 * c.get("moe_intermediate_size", 0) + 1)
    inputs = 2 * c["hidden_size_per_layer_input"]
    return E * ((2 * heads + kept) * width + 3 * inner + experts + inputs)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_of_recipes(name: str) -> None:
    recipe = find_recipe(name)
    assert recipe is not None
    whole, second, head = PUBLISHED[name]
    c = json.loads((recipe.config_folder / "config.json").read_text())["text_config"]
    L, inputs = c["num_hidden_layers"], c["hidden_size_per_layer_input"]
    table = 262144 * L * inputs
    products = sum(count_layer(c, i) for i in range(L)) + c["hidden_size"] * L * inputs
    counted = products + table + 262144 * c["hidden_size"]
    classes = count_classes(find_layout(name, None), ALONE)
    trunk = sum(weights.parameters for weights in classes if not weights.module)
    assert trunk == pytest.approx(counted, rel=1e-3)  # norms and scales are not counted
    assert trunk / 1e9 == pytest.approx(whole, rel=0.02)
    assert table / 1e9 == pytest.approx(second, rel=1e-3)
    module = sum(weights.parameters for weights in classes if weights.module)
    assert module / 1e9 == pytest.approx(head, rel=0.1)


def test_rings_take_a_fifth() -> None:
    """At a context of 32,768, with chunks of 2,048."""
    recipe = find_recipe("gemma-4-26b-a4b")
    assert recipe is not None
    config = load_recipe_config(recipe)
    plan = Plan(config, NEXTN, "mtp-assistant", 1, 32768, 2048)
    rings = sum(map(count_state_bytes, filter(is_cache, make_state_specs(plan))))
    rows = sum(find_family_of(config).cache_widths(config, ALONE)) * 4 * plan.capacity
    assert rings < 0.2 * rows


def is_cache(spec: StateSpec) -> bool:
    return spec.role in CACHED


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an engine in int4 with int8 caches and drafts, whose rings have 256 of 700 rows."""
    place = tmp_path_factory.mktemp("windowed")
    folder = save_exact(place / "trunk", "gemma4-dense")
    request = build_request(
        folder, (NEXTN,), out=place / "e", mtp=place / HEAD, max_seq_len=700, prefill_chunk=40,
        max_batch=2, weights="int4", cache_dtype="int8",
    )  # fmt: skip
    return build(request)[0].folder


def test_rings_are_as_long_as_they_need_be(windowed: Path) -> None:
    state = read_manifest(windowed).state
    rows = {s.name: (s.role, s.sizes["rows"]) for s in state if s.role in ("rows", "window")}
    assert rows == {f"kv.{i}": ("window", 256) for i in (0, 1, 3)} | {
        f"kv.{i}": ("rows", 704) for i in (2, 4)
    }


def test_the_head_of_drafts_is_int4(windowed: Path) -> None:
    """Its format costs no text anything; the trunk's is int8."""
    stored = {entry.name: entry.shape for entry in list_entries(windowed / WEIGHTS)}
    assert [stored[f"{at}lm_head.values"][-1] // 128 for at in ("", "mtp.0.")] == [8, 4]


def test_keys_of_int8_caches_are_balanced(windowed: Path) -> None:
    assert read_manifest(windowed).build.balanced_keys


def same(one: Result, other: Result) -> bool:
    """Return whether tokens and log-probabilities are equal to the bit."""
    return (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


def test_prompts_branch_behind_windows(windowed: Path) -> None:
    """A conversation may go on from any of its tokens, its answers' too, as from a cold start."""
    rng, params = (
        np.random.default_rng(5),
        SamplingParams(max_tokens=70, ignore_eos=True, logprobs=0),
    )
    few = replace(params, max_tokens=12)
    with Engine.load(windowed, prefix_cache=False) as cold, Engine.load(windowed) as warm:
        prompt = rng.integers(3, 60, 330).tolist()
        known = [*prompt, *warm.generate(prompt, params).token_ids]
        for _ in range(100):
            cut = int(rng.integers(1, len(known)))
            branch = known[:cut] + rng.integers(3, 60, 4).tolist()
            result = warm.generate(branch, few)
            assert result.metrics.cached_tokens >= cut // 64 * 64
            assert same(result, cold.generate(branch, few))
        # Beside another request, in a slot that moves.
        prompts = [known[:300], rng.integers(3, 60, 290).tolist(), known[:100]]
        for result, alone in zip(warm.generate(prompts, params), prompts, strict=True):
            assert same(result, cold.generate(alone, params))


def train(trunk: Trunk, head: Head, steps: int = 700) -> None:
    """Train a head on what its trunk says, so that its drafts are often right."""
    trunk.requires_grad_(False)
    embed, last = trunk.get_input_embeddings(), head.config.get_text_config().vocab_size
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    torch.manual_seed(0)
    for _ in range(steps):
        prompts = torch.randint(3, last, (24, 3))
        tokens = trunk.generate(prompts, max_new_tokens=16, do_sample=False)
        newest = int(torch.randint(4, 15, ()))
        outputs = trunk(
            tokens[:, :newest], output_hidden_states=True, return_shared_kv_states=True,
            use_cache=False,
        )  # fmt: skip
        hidden, loss = outputs.hidden_states[-1][:, -1:], torch.zeros(())
        for k in range(NEXTN):
            drafts = head(
                inputs_embeds=torch.cat([embed(tokens[:, newest + k, None]), hidden], dim=-1),
                position_ids=torch.tensor([[newest]]),
                shared_kv_states=outputs.shared_kv_states,
            )
            hidden = drafts.last_hidden_state
            logits = drafts.logits[:, 0]
            loss = loss + torch.nn.functional.cross_entropy(logits, tokens[:, newest + k + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    head.requires_grad_(False)


def count_steps(trunk: Trunk, head: Head, prompt: list[int], count: int) -> int:
    """Return how often transformers runs the trunk in assisted generation.

    Its loop shows the head the row of the first rejected draft, too; here that is cut off.
    """
    calls, forward, draft_by = 0, trunk.forward, Generator.get_candidates

    def draft_without(generator: Any, ids: Tensor, **named: Any) -> Any:
        outputs, kept = named["model_outputs"], ids.shape[1] - 1
        if outputs is not None:
            outputs.shared_kv_states = {
                kind: tuple(part[:, :, :kept] for part in both)
                for kind, both in outputs.shared_kv_states.items()
            }
        return draft_by(generator, ids, **named)

    def run(*operands: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return forward(*operands, **named)

    head.generation_config.num_assistant_tokens = NEXTN
    trunk.generation_config.eos_token_id = None
    trunk.generation_config.max_length = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trunk, "forward", run)
        patch.setattr(Generator, "get_candidates", draft_without)
        trunk.generate(
            torch.tensor([prompt]), assistant_model=head, max_new_tokens=count, do_sample=False
        )
    return calls


@pytest.mark.full
def test_as_many_drafts_are_accepted_as_by_transformers(tmp_path: Path) -> None:
    """Contexts are shorter than windows: beyond, transformers shows more rejected drafts' rows."""
    torch.manual_seed(0)
    trunk, head = (make("dense", sliding_window=80) for make in (make_trunk, make_assistant))
    train(trunk, head)
    folder, assistant = save(trunk, tmp_path / "trunk"), save(head, tmp_path / "head")
    request = build_request(folder, (NEXTN,), out=tmp_path / "e", mtp=assistant, max_seq_len=100)
    ours, theirs, rng = list[int](), list[int](), np.random.default_rng(0)
    with Engine.load(build(request)[0].folder) as engine:
        for _ in range(12):
            prompt = rng.integers(3, 60, 5).tolist()
            result = engine.generate(prompt, SamplingParams(max_tokens=33, ignore_eos=True))
            ours.append(result.from_draft.count(False))  # a token of each step's own
            theirs.append(count_steps(trunk, head, prompt, 33))
    assert sum(theirs) < 0.75 * 12 * 33, "the head is seldom right"
    assert all(abs(a - b) <= 1 for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.full
def test_steps_of_few_drafts_and_of_many(tmp_path: Path) -> None:
    trunk, head = make_trunk("dense"), make_assistant("dense")
    folder, assistant = save(trunk, tmp_path / "trunk"), save(head, tmp_path / "head")
    request = build_request(folder, ("auto",), out=tmp_path / "e", mtp=assistant, max_seq_len=300)
    prompt = np.random.default_rng(1).integers(3, 60, 40).tolist()
    with Engine.load(build(request)[0].folder) as engine:
        result = engine.generate(prompt, SamplingParams(max_tokens=200, ignore_eos=True))
        assert result.token_ids == continue_greedily(trunk, prompt, 200)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": 62}, "its trunk has vocab_size 62, the model 60: this head is another model's"),
    ({"head_dim": 8}, "its trunk has head_dim 8, the model 6"),
    ({"sliding_window": 6}, "its trunk has sliding_window 6, the model 5"),
]


@pytest.mark.parametrize(("changes", "why"), REFUSALS)
def test_heads_that_do_not_fit(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    folder = save(make_trunk("dense"), tmp_path / "trunk")
    assistant = save(make_assistant("dense", **changes), tmp_path / "head")
    with pytest.raises(CheckpointError) as error:
        read_head_config(assistant, folder, load_config(folder))
    assert str(error.value).startswith(f"--mtp {assistant}: {why}")


def test_a_head_without_tensors(tmp_path: Path) -> None:
    folder = save(make_trunk("dense"), tmp_path / "trunk")
    assistant = save(make_assistant("dense"), tmp_path / "head")
    save_file({"lm_head.weight": torch.zeros(2, 2)}, assistant / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        read_head_config(assistant, folder, load_config(folder))
    assert str(error.value) == f"--mtp {assistant}: no tensor of Gemma-4's assistant is there"
