"""Every family against transformers, against its own plain model, and with bugs that are planted.

A module's mistakes do not show in the text, for wrong drafts are just rejected: so every step's
drafts are recomputed, and the modules' hidden states are compared with transformers' where its
class has modules, or with what is written out here by hand (MiMo).
"""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtpbuild.builder.checkpoint.config import ModuleInputs, MoEConfig
from mtpbuild.builder.compiler.plans import plan_engines
from mtpbuild.builder.compiler.quantize import QuantizeRequest
from mtpbuild.builder.models import load_config
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.layers import MTPModule, Positions, Rope
from mtpbuild.builder.models.common.plain import PlainCausalLM, PlainLM
from mtpbuild.builder.plan.context import count_weights_bytes
from mtpbuild.builder.plan.plan import DrafterName
from mtpbuild.builder.weights.scheme import SCHEMES, make_scheme
from mtpbuild.lab.measure.runs import run_prompts
from mtpbuild.lab.verify.plain import load_plain
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.errors import CheckpointError, UsageError
from mtpbuild.runtime.programs import load_programs
from tests.support.checkpoints import SHAPES, load_reference, random_checkpoint
from tests.support.engines import EngineBuilder, greedy_ids
from tests.support.fake_target import greedy_only, quick_target
from tests.support.families import (
    CHOOSERS,
    FAMILIES,
    HYBRIDS,
    WITH_MODULES,
    make_config,
    make_family,
    modules_of,
    save_family,
)
from tests.support.forced import COUNT, DRAFTS, TOKENS, check_programs
from tests.support.inductor_engines import compiled_soon
from tests.support.numbers import check_rounded, plain_with_rounding
from tests.support.requests import build, build_request, quantize
from tests.support.steps import check_family
from tests.support.transformers_oracle import load_modules, transformers_greedy, transformers_model

ATOL = 2e-4
CHUNK = 16


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def saved(place: Path, name: str) -> tuple[PlainLM, Path]:
    """Save a checkpoint of a family, or of DeepSeek-V3 in one of its shapes."""
    if name in SHAPES:
        folder = random_checkpoint(place / name, **SHAPES[name])
        return load_reference(folder), folder
    ours = make_family(name)
    return ours, save_family(place / name, name, ours)


def oracle(folder: Path, name: str) -> Any:
    """Return transformers' model; MiMo's trunk is Qwen2's, whose names its checkpoint has."""
    if name != "mimo":
        return transformers_model(folder)
    from transformers import Qwen2Config, Qwen2ForCausalLM

    raw = json.loads((folder / "config.json").read_text())
    raw = {key: value for key, value in raw.items() if key not in ("model_type", "architectures")}
    theta = {"rope_type": "default", "rope_theta": raw["rope_theta"]}
    model = Qwen2ForCausalLM(Qwen2Config(**raw | {"rope_parameters": theta})).eval()
    tensors = load_file(folder / "model.safetensors")
    trunk = {name: tensor for name, tensor in tensors.items() if ".mtp_layers." not in name}
    model.load_state_dict(trunk)
    return model


@pytest.mark.parametrize("name", [*SHAPES, *FAMILIES])
def test_the_plain_model_equals_transformers(name: str, tmp_path: Path) -> None:
    ours, folder = saved(tmp_path, name)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 61, (2, 100)))
    with torch.no_grad():
        difference = (oracle(folder, name)(tokens).logits - ours.logits(ours.main(tokens))).abs()
    assert difference.max() < ATOL


# The rest of the matrix is `full`.
Case = tuple[str, int, DrafterName | None]
ENGINES: list[Case] = [("mimo", 1, "mtp-vanilla")]
MATRIX: list[Case] = [
    *((name, 0, None) for name in (*SHAPES, *FAMILIES)),
    *((name, 1, "mtp-vanilla") for name in WITH_MODULES),
    *(
        (name, 2, "mtp-vanilla" if modules_of(FAMILIES[name]) > 1 else "mtp-eagle")
        for name in WITH_MODULES
    ),
    *((name, 3, "mtp-eagle") for name in WITH_MODULES),
]


@pytest.mark.parametrize(
    ("name", "nextn", "drafter"),
    [case if case in ENGINES else pytest.param(*case, marks=pytest.mark.full) for case in MATRIX],
)
def test_engines_equal_transformers(
    name: str, nextn: int, drafter: DrafterName | None, tmp_path: Path, build_engine: EngineBuilder
) -> None:
    """Greedy tokens are transformers', whatever is drafted; drafts are the plain model's."""
    ours, folder = saved(tmp_path, name)
    tokens = np.random.default_rng(0).integers(0, 61, 60).tolist()
    prompts = [tokens[:length] for length in (1, 2, 17, 40)]
    theirs = oracle(folder, name)
    wanted = [transformers_greedy(theirs, prompt, 24) for prompt in prompts]
    with greedy_only():
        engine = build_engine(folder, nextn, drafter, prefill_chunk=CHUNK)
    assert greedy_ids(engine, prompts, 24) == wanted
    if drafter is not None:
        check_drafts(engine, ours, nextn, drafter)


def check_drafts(engine: Path, ours: PlainLM, nextn: int, drafter: DrafterName) -> None:
    """Every step's drafts are the plain model's; every number of them is accepted somewhere."""
    programs = load_programs(engine, read_manifest(engine), threads=1)
    check_programs(programs, ours, nextn, drafter, CHUNK, (11, 1, 2, CHUNK, CHUNK + 1, 20), 8)


@pytest.mark.xdist_group("inductor")
@pytest.mark.full
@pytest.mark.parametrize("name", WITH_MODULES)
def test_inductor(name: str, tmp_path: Path, build_engine: EngineBuilder) -> None:
    ours, folder = saved(tmp_path, name)
    with compiled_soon():
        engine = build_engine(folder, 3, "mtp-eagle", target="inductor", prefill_chunk=CHUNK)
    check_drafts(engine, ours, 3, "mtp-eagle")


CASES: list[Case] = [
    ("mimo", 2, "mtp-vanilla"),
    ("qwen3.5-ragged", 1, "mtp-eagle"),
    ("deepseek-v3.2", 2, "mtp-eagle"),
]
SLOW: list[Case] = [
    *((name, 3, "mtp-eagle") for name in ("gigachat", "glm-air", "mimo")),
    *((name, 2, "mtp-vanilla") for name in ("glm-4.6", "glm-flash", "deepseek-v3.2")),
    *((name, n, "mtp-eagle" if n else None) for name in HYBRIDS | CHOOSERS for n in range(4)),
]


@pytest.mark.parametrize(
    ("name", "nextn", "drafter"),
    [
        *CASES,
        *(pytest.param(*case, marks=pytest.mark.full) for case in SLOW if case not in CASES),
    ],
)
def test_every_step_equals_recomputation(
    name: str, nextn: int, drafter: DrafterName | None
) -> None:
    check_family(make_family(name), nextn, drafter)


RULES = [ModuleInputs(trunk_normed=False), ModuleInputs(recycles_normed=False)]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize(
    ("nextn", "drafter"), [(2, "mtp-eagle"), pytest.param(2, "mtp-vanilla", marks=pytest.mark.full)]
)
def test_what_published_engines_do_otherwise_is_one_field(
    nextn: int, drafter: DrafterName, rules: ModuleInputs
) -> None:
    model = make_family("glm-air")
    model.config = replace(model.config, mtp=rules)
    check_family(model, nextn, drafter)


WITH_MTP_MODEL = ["gigachat", "glm-flash", "glm-air", "glm-4.6"]
WITH_MTP_MODEL += ["yarn-three-modules", "no-q-lora-one-module"]


@pytest.mark.parametrize("name", WITH_MTP_MODEL)
def test_modules_equal_transformers(name: str, tmp_path: Path) -> None:
    """Hidden states and drafts of each module, against transformers' `MtpModel`."""
    from transformers.modeling_layers import MtpModel

    ours, folder = saved(tmp_path, name)
    trunk, modules = transformers_model(folder), ours.config.num_nextn_predict_layers
    if name == "glm-flash":  # its configuration knows no modules
        trunk.config.num_mtp_layers, trunk.config.mtp_mlp_layer_types = 2, ["sparse"] * 2
    theirs = MtpModel(trunk, modules).eval()
    load_modules(theirs, ours)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 61, (1, 30)))
    with torch.no_grad():
        hidden = ours.main(tokens)
        for k in range(modules):
            hidden, following = hidden[:, :-1], tokens[:, k + 1 :]
            positions = torch.arange(following.shape[1])[None]
            got = theirs.forward_layer(k, hidden, positions, None, input_ids=following)
            hidden = ours.mtp(k + 1, following, hidden)
            assert (got - hidden).abs().max() < ATOL
            drafts = ours.draft_logits(k + 1, hidden).argmax(-1)
            assert torch.equal(trunk.lm_head(got).argmax(-1), drafts)


def test_a_module_of_mimo_equals_what_is_written_out_here(tmp_path: Path) -> None:
    """Its module joins hidden first, from before the final norm, and has Qwen2's block."""
    ours = make_family("mimo")
    w = load_file(save_family(tmp_path / "mimo", "mimo", ours) / "model.safetensors")
    c, at, T = make_config("mimo"), "model.mtp_layers.0.", 20
    H, G, D = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    tokens = torch.from_numpy(np.random.default_rng(2).integers(0, 61, T + 1))
    before_norm = torch.randn(T, c["hidden_size"])

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c["rms_norm_eps"]).sqrt() * w[at + name]

    def turned(x: Tensor) -> Tensor:
        angles = torch.arange(T)[:, None] * c["rope_theta"] ** (-torch.arange(0, D, 2) / D)
        a, b = x[:, : D // 2], x[:, D // 2 :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def attention(x: Tensor) -> Tensor:
        q, k, v = (
            (x @ w[f"{at}self_attn.{n}_proj.weight"].T + w[f"{at}self_attn.{n}_proj.bias"])
            for n in "qkv"
        )
        outputs = []
        for head in range(H):
            own, shared = slice(head * D, head * D + D), head // (H // G) * D
            scores = turned(q[:, own]) @ turned(k[:, shared : shared + D]).T / D**0.5
            p = scores.masked_fill(torch.ones(T, T).triu(1) > 0, float("-inf")).softmax(-1)
            outputs.append(p @ v[:, shared : shared + D])
        return torch.cat(outputs, -1) @ w[f"{at}self_attn.o_proj.weight"].T

    embedding = w["model.embed_tokens.weight"][tokens[1:]]
    joined = [
        norm(before_norm, "hidden_layernorm.weight"),
        norm(embedding, "token_layernorm.weight"),
    ]
    x = torch.cat(joined, -1) @ w[at + "input_proj.weight"].T
    x = x + attention(norm(x, "input_layernorm.weight"))
    y = norm(x, "post_attention_layernorm.weight")
    inner = F.silu(y @ w[at + "mlp.gate_proj.weight"].T) * (y @ w[at + "mlp.up_proj.weight"].T)
    x = x + inner @ w[at + "mlp.down_proj.weight"].T
    logits = norm(x, "final_layernorm.weight") @ w["lm_head.weight"].T
    with torch.no_grad():
        g = ours.mtp(1, tokens[None, 1:], before_norm[None])
        assert (g[0] - x).abs().max() < ATOL
        assert (ours.draft_logits(1, g)[0] - logits).abs().max() < ATOL
        # The trunk hands on what its final norm reads.
        main = ours.main(tokens[None])
        assert (ours.lm_head(ours.model.norm(main)) - ours.logits(main)).abs().max() == 0


Bug = Callable[[CausalLM], None]


def rule(**changes: bool) -> Bug:
    """Let the program do otherwise than its family says."""

    def plant(model: CausalLM) -> None:
        rules = replace(model.config.mtp, **changes)
        model.config = replace(model.config, mtp=rules)
        for module in model.mtp:
            assert isinstance(module, MTPModule)
            module.rules = rules

    return plant


def first_embedding_zeroed(model: CausalLM) -> None:
    """vLLM does so, where tokens are shifted and positions are not (its issue #33299)."""

    def plant(module: MTPModule) -> None:
        join = module.combine_inputs

        def wrong(embedding: Tensor, hidden: Tensor, rows: Positions) -> Tensor:
            first = rows.positions[..., None] == 0
            return join(embedding.masked_fill(first, 0.0), hidden, rows)

        module.combine_inputs = wrong  # type: ignore[method-assign]

    for module in model.mtp:
        assert isinstance(module, MTPModule)
        plant(module)


def draft_positions_stand_still(model: CausalLM) -> None:
    class Still(torch.nn.Module):
        def __init__(self, rope: Rope) -> None:
            super().__init__()
            self.rope = rope

        def forward(self, start: Tensor, tokens: int, *how: Any, offset: int = 0) -> Positions:
            rows: Positions = self.rope(start, tokens, *how)
            return replace(rows, first=rows.first + offset)

    model.rope = Still(model.rope)  # type: ignore[assignment]


def attention_biases_dropped(model: CausalLM) -> None:
    attention: Any = model.layers[0].self_attn
    attention.qkv_bias.zero_()


def heads_not_normed(model: CausalLM) -> None:
    attention: Any = model.layers[0].self_attn
    attention.k_norm = None


def every_value_rotates(model: CausalLM) -> None:
    c: Any = model.config
    model.rope = Rope(c.rope, c.head_dim)


def module_reads_the_trunks_embedding(model: CausalLM) -> None:
    model.module(0).embed_tokens = None


# Each with the oracle's message.
BUGS: list[tuple[str, Bug, str]] = [
    ("gigachat", rule(hidden_first=True), DRAFTS),
    ("glm-flash", rule(trunk_normed=False), DRAFTS),
    ("glm-air", rule(recycles_normed=False), DRAFTS),
    ("mimo", rule(hidden_first=False), DRAFTS),
    ("mimo", rule(trunk_normed=True), DRAFTS),
    ("mimo", rule(recycles_normed=True), DRAFTS),
    ("gigachat", first_embedding_zeroed, DRAFTS),
    ("glm-flash", draft_positions_stand_still, DRAFTS),
    ("glm-air", attention_biases_dropped, TOKENS),
    ("mimo", attention_biases_dropped, DRAFTS),
    ("glm-4.6", heads_not_normed, COUNT),
    ("glm-air", every_value_rotates, DRAFTS),
]
# The same in other families.
MORE_BUGS: list[tuple[str, Bug, str]] = [
    *((name, rule(hidden_first=True), DRAFTS) for name in ("glm-flash", "glm-air")),
    *((name, rule(trunk_normed=False), DRAFTS) for name in ("gigachat", "glm-air")),
    *((name, rule(recycles_normed=False), DRAFTS) for name in ("gigachat", "glm-flash")),
    *((name, first_embedding_zeroed, DRAFTS) for name in ("glm-flash", "glm-air", "mimo")),
    *((name, draft_positions_stand_still, DRAFTS) for name in ("gigachat", "glm-air", "mimo")),
]


@pytest.mark.parametrize(
    ("name", "bug", "says"),
    [*BUGS, *(pytest.param(*bug, marks=pytest.mark.full) for bug in MORE_BUGS)],
)
def test_the_oracle_catches(name: str, bug: Bug, says: str) -> None:
    with pytest.raises(AssertionError, match=f"^{says}"):
        check_family(make_family(name), 3, "mtp-eagle", bug)


@pytest.fixture
def own_ends(tmp_path: Path) -> Path:
    """GLM's first module has an embedding and a head of its own here, its second a true copy."""
    folder = save_family(tmp_path / "own", "glm-flash", make_family("glm-flash"))
    tensors = load_file(folder / "model.safetensors")
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    order = torch.randperm(len(head), generator=torch.Generator().manual_seed(0))
    tensors["model.layers.2.embed_tokens.weight"] = embedding[order].clone()
    tensors["model.layers.2.shared_head.head.weight"] = head.roll(1, 0)
    tensors["model.layers.3.embed_tokens.weight"] = embedding.clone()
    tensors["model.layers.3.shared_head.head.weight"] = head.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_copies_that_differ_are_used(
    own_ends: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The step program uses them, which is what an engine compiles."""
    with quick_target("onnxruntime"), caplog.at_level(logging.WARNING):
        build(build_request(own_ends, (2,), out=tmp_path / "n2"))
    output = [record.getMessage() for record in caplog.records if "differs" in record.getMessage()]
    assert output == [
        f"note: the {what} stored in model.layers.2 differs from the trunk's: drafts use it"
        for what in ("embedding", "head")
    ]
    ours = load_plain(own_ends)
    assert isinstance(ours, PlainCausalLM)
    check_family(ours, 1, "mtp-eagle", accepts_all=False)
    with pytest.raises(AssertionError, match=f"^{DRAFTS}"):
        check_family(ours, 1, "mtp-eagle", module_reads_the_trunks_embedding, accepts_all=False)


@pytest.mark.full
def test_an_engine_uses_copies_that_differ(own_ends: Path, build_engine: EngineBuilder) -> None:
    with greedy_only():
        engine = build_engine(own_ends, 2, "mtp-vanilla", prefill_chunk=CHUNK)
    ours = load_plain(own_ends)
    assert isinstance(ours, PlainCausalLM)
    programs = load_programs(engine, read_manifest(engine), threads=1)
    check_programs(programs, ours, 2, "mtp-vanilla", CHUNK, (11, 1, CHUNK + 1), 6, every=False)


NEXTN = "num_nextn_predict_layers"


@pytest.mark.parametrize(
    ("name", "stripped", "says"),
    [
        ("glm-air", "model.layers.2.", f"{NEXTN} 1, but MTP layer model.layers.2 is missing"),
        ("mimo", "model.mtp_layers.", f"{NEXTN} 1, but MTP layer model.mtp_layers.0 is missing"),
        ("qwen3.5", "mtp.", "mtp_num_hidden_layers 1, but MTP layer mtp.layers.0"),
    ],
)
def test_stripped_modules(name: str, stripped: str, says: str, tmp_path: Path) -> None:
    one = {} if name == "qwen3.5" else {NEXTN: 1}
    folder = save_family(tmp_path / name, name, make_family(name, **one), **one)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(stripped)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=says):
        build(build_request(folder, (1,), out=tmp_path / "n1"))
    assert not (tmp_path / "n1").exists()
    without = plan_engines(build_request(folder, (0,), out=tmp_path / "n0")).open_model()
    assert without.config.num_nextn_predict_layers == 0
    assert not any(weight.name.startswith("mtp.") for weight in without.table)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gigachat", "qwen3-next", "qwen3"])
def test_the_bytes_that_checks_expect(name: str, dtype: str, tmp_path: Path) -> None:
    """Routers, exponents and heads of CPUs stay fp32 in an engine of bfloat16."""
    folder = save_family(tmp_path / name, name, make_family(name))
    out = tmp_path / "engine"
    plans = plan_engines(build_request(folder, (0,), out=out, target="inductor", dtype=dtype))
    assert count_weights_bytes(plans.engines[out], folder) == plans.open_model().weight_bytes


@pytest.mark.parametrize("name", ["gigachat", "mimo"])
def test_a_configuration_that_does_not_count_its_modules(name: str, tmp_path: Path) -> None:
    """What is stored counts; transformers would take one."""
    folder = save_family(tmp_path / name, name, make_family(name))
    raw = json.loads((folder / "config.json").read_text())
    del raw["num_nextn_predict_layers"]
    (folder / "config.json").write_text(json.dumps(raw))
    assert load_config(folder).num_nextn_predict_layers == 2
    load_plain(folder)


def test_modules_of_mimo_have_names_that_modelopts_list_knows() -> None:
    config = make_family("mimo").config
    excluded = SCHEMES["nvfp4"].exclude_modules(config)
    assert excluded[-2:] == ["model.mtp_layers.0*", "model.mtp_layers.1*"]
    both = make_scheme("nvfp4", "nvfp4", None)
    attention = "model.mtp_layers.0.self_attn.q_proj.weight"
    assert both.wanted(config, attention) is None
    assert both.wanted(config, "model.mtp_layers.0.mlp.up_proj.weight") is not None


DSA = (
    r"its attention to chosen rows \(DSA\) has no GPU kernel in target tensorrt.*: build with targ"
)


@pytest.mark.parametrize("name", ["glm-air", "mimo", "qwen3.5", "glm-5"])
def test_targets_for_gpus_refuse_what_they_have_no_kernel_for(name: str, tmp_path: Path) -> None:
    folder = save_family(tmp_path / name, name, make_family(name))
    says = DSA if name == "glm-5" else "grouped-query attention has no GPU kernel yet"
    targets = [{"target": "tensorrt-rtx", "compute_capability": "sm89"}, {"target": "tensorrt"}]
    if name != "glm-5":
        targets.append({"target": "inductor", "device": "cuda"})
    for flags in targets:
        with pytest.raises(UsageError, match=says):
            build(build_request(folder, (0,), out=tmp_path / "engine", **flags))


def test_which_layers_have_experts() -> None:
    """A module's own number decides, as a trunk layer's does."""

    def sparse(model: PlainCausalLM) -> list[int]:
        assert isinstance(model.config, MoEConfig)
        return [i for i, is_moe in enumerate(model.config.moe_layers) if is_moe]

    model = make_family("glm-air", num_hidden_layers=3, moe_layer_freq=2, first_k_dense_replace=2)
    assert sparse(model) == [2, 4]
    listed: Any = {"mlp_layer_types": ["sparse", "dense"]}
    assert sparse(make_family("glm-flash", **listed)) == [0, 2, 3]
    listed |= {"mtp_mlp_layer_types": ["dense", "sparse"]}
    assert sparse(make_family("glm-flash", **listed)) == [0, 3]
    check_family(model, 2, "mtp-vanilla")
    for wrong in (["dense"], ["dense", "moe"], "sparse"):
        with pytest.raises(CheckpointError, match="mlp_layer_types must be a list of 2 names"):
            make_family("glm-flash", mlp_layer_types=wrong)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("glm-air", {"num_key_value_heads": 4}, "num_attention_heads 6 must be a multiple of num_key_"),
    ("glm-air", {"partial_rotary_factor": 0.4}, "partial_rotary_factor rotates 3 of head_dim 8 v"),
    ("glm-air", {"partial_rotary_factor": 1.5}, "partial_rotary_factor rotates 12 of head_dim 8"),
    ("glm-air", {"n_group": 4}, "n_routed_experts 6 must split into n_group 4"),
    ("qwen3.5", {"linear_num_value_heads": 5}, "linear_num_value_heads 5 must be a multiple of"),
    ("qwen3.5", {"layer_types": ["linear_attention"] * 4}, "layer_types has no full_attention"),
    ("qwen3.5", {"layer_types": ["full_attention"]}, "layer_types must be a list of 4 names"),
    ("qwen3.5", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers 2 is not supported"),
    ("qwen3.5", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ("qwen3.5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer of 2.."),
    ("qwen3.5", {"mlp_only_layers": [9]}, "mlp_only_layers must be a list of layers below 4"),
    ("glm-5", {"index_head_dim": 3}, "index_head_dim 3 is below qk_rope_head_dim 4"),
    ("glm-5", {"index_topk": 0}, "index_topk must be an integer of 1.."),
    ("glm-5", {"q_lora_rank": None}, "q_lora_rank is missing"),
    ("glm-5", {"indexer_types": ["full", "shared"]}, "a name for each of 3 layers"),
    ("glm-5", {"indexer_types": ["shared", "full", "full"]}, "the first one full, not 3 from"),
    ("glm-5", {"indexer_types": ["full", "all", "full"]}, "indexer_types must be a list of names"),
]


@pytest.mark.parametrize(("name", "overrides", "says"), WRONG)
def test_configurations_that_do_not_fit(name: str, overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        make_family(name, **overrides)


# Widths that split into blocks of 32.
BLOCKS: dict[str, dict[str, Any]] = {
    "glm-4.6": {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    | {"num_attention_heads": 4, "head_dim": 16},
    "mimo": {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16},
    "qwen3.5": {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    | {"linear_value_head_dim": 16},
    "qwen3.5-moe": {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
    | {"linear_num_value_heads": 4, "linear_value_head_dim": 16}
    | {"shared_expert_intermediate_size": 32},
    "deepseek-v3.2": {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    | {"q_lora_rank": 32, "kv_lora_rank": 32, "num_attention_heads": 4, "v_head_dim": 16},
    "gigachat": {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    | {"kv_lora_rank": 32, "num_attention_heads": 4, "v_head_dim": 16},
    "glm-flash": {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    | {"q_lora_rank": 32, "kv_lora_rank": 32, "num_attention_heads": 4, "v_head_dim": 16},
}


@pytest.mark.full
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_quantised_engines_equal_the_dequantised_model(
    name: str, format: str, tmp_path: Path
) -> None:
    """Products, embedding and head keep their format; what goes into a product is rounded."""
    folder = save_family(tmp_path / name, name, make_family(name, **BLOCKS[name]), **BLOCKS[name])
    drafter: DrafterName = "mtp-eagle" if name in HYBRIDS else "mtp-vanilla"
    flags: dict[str, Any] = {"weights": format, "out": tmp_path / "e", "prefill_chunk": 8}
    (engine,) = build(build_request(folder, (2,), drafter=drafter, **flags))
    assert engine.manifest.build.weights == format
    scheme = make_scheme(format, None, None, "int8")
    checkpoint = quantize(QuantizeRequest(str(folder), scheme, tmp_path / "quantised")).folder
    prompts = [np.random.default_rng(n).integers(0, 61, n).tolist() for n in (2, 9, 20)]
    params = [SamplingParams(max_tokens=30, ignore_eos=True, logprobs=1)] * len(prompts)
    with Engine.load(engine.folder, threads=1) as loaded:
        output = run_prompts(loaded, prompts, params)
    check_rounded(plain_with_rounding(checkpoint), prompts, output)
