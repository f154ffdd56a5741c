"""Layers of a gated delta rule: states, slots, checkpoints as published, and planted bugs.

`test_families.py` compares their logits, texts and drafts with transformers.
"""

import json
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

from mtpbuild.builder.checkpoint.layers_slice import parse_layers
from mtpbuild.builder.checkpoint.shards import SINGLE
from mtpbuild.builder.compiler.notes import list_notes
from mtpbuild.builder.compiler.plans import plan_engines
from mtpbuild.builder.models import load_config
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.layers import RMSNorm, State
from mtpbuild.builder.models.common.plain import PlainCausalLM, PlainLM
from mtpbuild.builder.models.common.weight import Share, convert_weights, join_slices
from mtpbuild.builder.models.qwen3_5.config import Qwen35Config
from mtpbuild.builder.models.qwen3_5.model import DeltaLayer, GatedDelta
from mtpbuild.lab.verify.plain import load_plain
from mtpbuild.plugins import delta_advance, delta_rule
from mtpbuild.plugins.matmul_scaled.op import dequantise
from mtpbuild.runtime.contract.state import name_layer_state
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.ranks import Ranks
from tests.support.checkpoints import lower
from tests.support.families import HYBRIDS, make_config, make_family, save_family
from tests.support.forced import COUNT, DRAFTS, STATES, TOKENS
from tests.support.opened import opened
from tests.support.requests import build_request
from tests.support.steps import check_family
from tests.support.transformers_oracle import transformers_model

ATOL = 2e-4
SOME = "qwen3.5-ragged"  # for bugs that are planted
# A wrong trunk shows in the text, or earlier in the drafts that are made from its hidden states.
TEXT = f"{TOKENS}|{COUNT}|{DRAFTS}"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_a_module_equals_what_is_written_out_here(tmp_path: Path) -> None:
    """Embedding first, norms of 1 + w, attention with a gate, and its own norm at the end."""
    ours = make_family("qwen3.5-ragged")
    w = load_file(save_family(tmp_path / "m", "qwen3.5-ragged", ours) / "model.safetensors")
    c, at, T = make_config("qwen3.5-ragged"), "mtp.layers.0.", 20
    H, G, D, R = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"], 4
    tokens = torch.from_numpy(np.random.default_rng(2).integers(0, 61, T))
    hidden = torch.randn(T, c["hidden_size"])

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + w[f"{name}.weight"])

    def turned(x: Tensor) -> Tensor:
        angles = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, R, 2) / R)
        a, b, rest = x[:, : R // 2], x[:, R // 2 : R], x[:, R:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def attention(x: Tensor) -> Tensor:
        both = (x @ w[f"{at}self_attn.q_proj.weight"].T).reshape(T, H, 2, D)
        k, v = ((x @ w[f"{at}self_attn.{n}_proj.weight"].T).reshape(T, G, D) for n in "kv")
        outputs = []
        for head in range(H):
            q = turned(norm(both[:, head, 0], f"{at}self_attn.q_norm"))
            key = turned(norm(k[:, head // (H // G)], f"{at}self_attn.k_norm"))
            scores = (q @ key.T / D**0.5).masked_fill(torch.ones(T, T).triu(1) > 0, -torch.inf)
            outputs.append(scores.softmax(-1) @ v[:, head // (H // G)] * both[:, head, 1].sigmoid())
        return torch.cat(outputs, -1) @ w[f"{at}self_attn.o_proj.weight"].T

    embedding = w["model.embed_tokens.weight"][tokens]
    halves = [norm(embedding, "mtp.pre_fc_norm_embedding"), norm(hidden, "mtp.pre_fc_norm_hidden")]
    x = torch.cat(halves, -1) @ w["mtp.fc.weight"].T
    x = x + attention(norm(x, f"{at}input_layernorm"))
    y = norm(x, f"{at}post_attention_layernorm")
    inner = F.silu(y @ w[f"{at}mlp.gate_proj.weight"].T) * (y @ w[f"{at}mlp.up_proj.weight"].T)
    recycled = norm(x + inner @ w[f"{at}mlp.down_proj.weight"].T, "mtp.norm")
    with torch.no_grad():
        g = ours.mtp(1, tokens[None], hidden[None])
        assert (g[0] - recycled).abs().max() < ATOL
        logits = recycled @ w["lm_head.weight"].T
        assert (ours.draft_logits(1, g)[0] - logits).abs().max() < ATOL


def test_the_rule_is_transformers_rule() -> None:
    """Outputs and states of the op, from any state on, and a state that n tokens advance."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    B, T, G, H, K, V = 3, 9, 2, 6, 5, 7
    mixed, ba = torch.randn(B, T, 2 * G * K + H * V), torch.randn(B, T, 2 * H)
    rate, bias, state = torch.rand(H), torch.randn(H), torch.randn(B, H, K, V)
    q, k, v = mixed.split([G * K, G * K, H * V], -1)
    own = (q.unflatten(-1, (G, K)), k.unflatten(-1, (G, K)), v.unflatten(-1, (H, V)))
    b, a = ba.chunk(2, -1)
    decay = -rate * F.softplus(a + bias)

    def theirs(tokens: int) -> tuple[Tensor, Tensor]:
        cut = [each[:, :tokens] for each in (*own, decay, b.sigmoid())]
        how = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        found: tuple[Tensor, Tensor] = torch_recurrent_gated_delta_rule(
            *cut, initial_state=state, **how
        )
        return found

    outputs, after = delta_rule(mixed, ba, rate, bias, state)
    wanted = theirs(T)
    torch.testing.assert_close((outputs, after), wanted, atol=1e-5, rtol=1e-5)
    n = torch.tensor([0, 4, T])
    advanced = delta_advance(mixed, ba, rate, bias, state, n)
    assert torch.equal(advanced[0], state[0])
    torch.testing.assert_close(advanced[1], theirs(4)[1][1], atol=1e-5, rtol=1e-5)
    assert torch.equal(advanced[2], after[2])


def test_states_of_slots_that_idle() -> None:
    """An idle slot's states stay as they are to the bit, beside one that goes on."""
    model = lower(make_family("qwen3.5"))
    layer: Any = model.layers[0]
    c = model.config
    assert isinstance(c, Qwen35Config)
    torch.manual_seed(0)
    state = {
        "conv": torch.randn(2, c.linear_conv_kernel_dim - 1, c.channels),
        "delta": torch.randn(2, 4, c.linear_key_head_dim, c.linear_value_head_dim),
    }
    _, tokens = layer(torch.randn(2, 4, c.hidden_size), state, None)
    new = layer.advance(state, tokens, torch.tensor([0, 3]))
    for name, before in state.items():
        assert torch.equal(new[name][0], before[0]), name
        assert not torch.equal(new[name][1], before[1]), name
    assert {name_layer_state(name, 0) for name in new} == {"conv.0", "delta.0"}


def as_published(folder: Path, name: str, model: PlainCausalLM, **overrides: Any) -> Path:
    """Write a checkpoint as the repositories have it: wrapped, with stacked experts, a tower."""
    save_family(folder, name, model, **overrides)
    tensors = load_file(folder / "model.safetensors")
    found = {"model.visual.patch_embed.proj.weight": torch.ones(3, 4)}
    stacks: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name_, tensor in tensors.items():
        if ".experts." not in name_:
            found[name_.replace("model.", "model.language_model.", 1)] = tensor
            continue
        stack, _, rest = name_.partition(".experts.")
        expert, kind, _ = rest.split(".")
        stacks.setdefault(stack, {})[int(expert), kind] = tensor
    for stack, own in stacks.items():
        at = stack.replace("model.", "model.language_model.", 1) + ".experts."
        count = 1 + max(expert for expert, _ in own)
        both = [torch.cat([own[e, "gate_proj"], own[e, "up_proj"]]) for e in range(count)]
        found[f"{at}gate_up_proj"] = torch.stack(both)
        found[f"{at}down_proj"] = torch.stack([own[e, "down_proj"] for e in range(count)])
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    kind = raw["model_type"].removesuffix("_text")
    architectures = [raw.pop("architectures")[0].replace("CausalLM", "ConditionalGeneration")]
    wrapper = {"architectures": architectures, "model_type": kind, "text_config": raw}
    wrapper["tie_word_embeddings"] = raw["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(wrapper | {"vision_config": {"depth": 1}}))
    return folder


SUMS = 1e-5  # where weights lie in memory decides how a product sums up few rows


@torch.no_grad()
def check_plain(read: PlainLM, wanted: PlainLM) -> None:
    """Check the hidden states of trunk and module."""
    tokens = torch.arange(20)[None]
    main = read.main(tokens)
    torch.testing.assert_close(main, wanted.main(tokens), rtol=0, atol=SUMS)
    drafted = read.mtp(1, tokens, main), wanted.mtp(1, tokens, main)
    torch.testing.assert_close(*drafted, rtol=0, atol=SUMS)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5-moe"])
def test_checkpoints_as_published(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Names of a wrapper, stacked experts; the tower is left out, and that is said."""
    ours = make_family(name)
    folder = as_published(tmp_path / name, name, ours)
    config = load_config(folder)
    assert config == ours.config
    assert config.num_nextn_predict_layers == 1
    check_plain(load_plain(folder), ours)
    opened = plan_engines(build_request(folder, (1,), out=tmp_path / "e")).open_model()
    assert opened.ids.eos_token_ids == (1, 2)
    assert "the vision tower (1 tensors) is left out" in "".join(list_notes(opened))


def test_stacks_equal_transformers(tmp_path: Path) -> None:
    """transformers' own model of the same stacks, whose names `save_pretrained` splits."""
    ours = make_family("qwen3.5-moe")
    theirs = transformers_model(save_family(tmp_path / "s", "qwen3.5-moe", ours))
    stacked = as_published(tmp_path / "p", "qwen3.5-moe", ours)
    held = load_file(stacked / "model.safetensors")
    for name in ("gate_up_proj", "down_proj"):
        wanted = theirs.model.layers[0].mlp.experts.state_dict()[name]
        assert torch.equal(held[f"model.language_model.layers.0.mlp.experts.{name}"], wanted)


LARGE = {
    "hidden_size": 160,
    "intermediate_size": 192,
    "linear_key_head_dim": 48,
    "linear_value_head_dim": 48,
}
# What Qwen's repositories in fp8 keep in bf16.
NOT_FP8 = ("in_proj_a.", "in_proj_b.", "in_proj_ba.", "conv1d", "mlp.gate.", "shared_expert_gate")
ENDS = ("embed_tokens", "lm_head", "mtp.fc")


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round a matrix to fp8 in blocks of 128 x 128: its values, their scales, what they mean."""
    rows, columns = (torch.arange(size) // 128 for size in weight.shape)
    scales = 1e-3 * torch.rand(int(rows[-1]) + 1, int(columns[-1]) + 1)
    every = scales[rows][:, columns]
    values = (weight / every).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values, scales, values.float() * every


@pytest.mark.parametrize(
    "name",
    ["qwen3.5", *(pytest.param(n, marks=pytest.mark.full) for n in ("qwen3.5-moe", "qwen3-next"))],
)
def test_fp8_in_blocks(name: str, tmp_path: Path) -> None:
    """Blocks lie across heads whose rows are put into another order; ranks have parts of them."""
    ours = make_family(name, **LARGE)
    folder, plain = (save_family(tmp_path / at, name, ours, **LARGE) for at in ("fp8", "plain"))
    found, meant = dict[str, Tensor](), dict[str, Tensor]()
    for key, tensor in load_file(plain / SINGLE).items():
        found[key] = meant[key] = tensor
        if tensor.dim() == 2 and not any(part in key for part in NOT_FP8 + ENDS):
            found[key], found[f"{key}_scale_inv"], meant[key] = in_blocks(tensor)
    for place, tensors in ((folder, found), (plain, meant)):
        save_file(tensors, place / SINGLE, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    output = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": output}))

    check_plain(load_plain(folder), load_plain(plain))
    for ranks in (Ranks(), Ranks(2)):
        model = opened(folder, formats=("fp8",), ranks=ranks)
        assert {at.rpartition(".")[2] for at in model.table.formats} >= {"in_proj", "out_proj"}
        for rank in range(ranks.tp):
            share, table = Share(ranks, rank), model.table.of_rank(rank)
            kept = dict(join_slices(convert_weights(model.checkpoint, table, share)))
            floats = [replace(weight, format=None) for weight in table]
            for at, weight in join_slices(convert_weights(opened(plain).checkpoint, floats, share)):
                parts = (kept.get(f"{at}.{part}") for part in ("values", "scales"))
                held = kept[at] if at in kept else dequantise(*parts)  # type: ignore[arg-type]
                assert torch.equal(held, weight), at


def test_slices_of_layers(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "m", "qwen3.5", make_family("qwen3.5"))
    output: dict[str, Any] = {"layers": parse_layers("1-2"), "out": tmp_path / "e"}
    with pytest.raises(UsageError, match=r"--layers 1-2 has no layer with attention.*one is 3"):
        plan_engines(build_request(folder, (0,), **output))
    job = plan_engines(build_request(folder, (1,), **output | {"layers": parse_layers("2-3")}))
    config = job.open_model().config
    assert isinstance(config, Qwen35Config)
    assert config.delta_layers == (True, False)


# Planted bugs, each with the oracle's message.
Advance = Callable[[Tensor, int], Tensor]  # n, T -> n


def advanced(which: str, count: Advance) -> Callable[[pytest.MonkeyPatch], None]:
    """Let one of a layer's two states be advanced by another number of tokens."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        advance = GatedDelta.advance

        def wrong(self: GatedDelta, state: State, tokens: State, n: Tensor) -> State:
            other = advance(self, state, tokens, count(n, tokens["mixed"].shape[1]))
            return advance(self, state, tokens, n) | {which: other[which]}

        patch.setattr(GatedDelta, "advance", wrong)

    return plant


def swapped_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Decay behind the write, where the rule decays in front of it."""
    error = v - (state * k[..., None]).sum(-2)
    state = state + k[..., None] * (beta[..., None] * error)[..., None, :]
    state = state * decay[..., None, None]
    return state, (state * q[..., None]).sum(-2)


def late_decay(patch: pytest.MonkeyPatch) -> None:
    from mtpbuild.plugins.delta_rule import op

    patch.setattr(op, "step", swapped_step)


def gate_in_front_of_the_norm(patch: pytest.MonkeyPatch) -> None:
    forward = GatedDelta.forward

    def wrong(self: GatedDelta, x: Tensor, state: State) -> tuple[Tensor, State]:
        _, tokens = forward(self, x, state)
        o, _ = delta_rule(tokens["mixed"], tokens["ba"], *self.decay, state["delta"])
        _, z = (x @ self.in_proj).split(self.sizes, dim=-1)
        y = self.norm(o * F.silu(z.unflatten(-1, o.shape[2:])))
        return y.flatten(2) @ self.out_proj, tokens

    patch.setattr(GatedDelta, "forward", wrong)


STATE_BUGS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "advanced by all of the window": (advanced("delta", lambda n, T: torch.full_like(n, T)), TEXT),
    "advanced by one less": (advanced("delta", lambda n, T: (n - 1).clamp(min=0)), TEXT),
    "a tail of one less": (advanced("conv", lambda n, T: (n - 1).clamp(min=0)), TEXT),
    "decays behind the write": (late_decay, TEXT),
    "the gate in front of the norm": (gate_in_front_of_the_norm, TEXT),
}


@pytest.mark.parametrize("bug", STATE_BUGS)
def test_wrong_states_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, says = STATE_BUGS[bug]
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=f"({says}|{STATES})"):
        check_family(make_family(SOME), 2, "mtp-eagle")


def plain_factor(find: Callable[[CausalLM], Any]) -> Callable[[CausalLM], None]:
    """Forget in one norm that its factor is 1 + w."""

    def plant(model: CausalLM) -> None:
        norm = find(model)
        assert isinstance(norm, RMSNorm)
        norm.weight.sub_(1)

    return plant


def gate_of_attention_dropped(model: CausalLM) -> None:
    attention: Any = model.layers[0].self_attn
    H, D = attention.heads, attention.width
    attention.qkv_proj[:, : H * D] = 0  # each gate is a half


def module_hands_on(model: CausalLM) -> None:
    module: Any = model.module(0)
    module.compute_next_hidden = lambda x: x
    module.compute_head_input = lambda hidden: module.norm(hidden)


def trunk_in_front_of_its_norm(model: CausalLM) -> None:
    norm, model.norm = model.norm, torch.nn.Identity()  # type: ignore[assignment]
    own: Any = model
    head = model.logits
    own.logits = lambda hidden, *others: head(norm(hidden), *others)


def module_norm(name: str) -> Callable[[CausalLM], Any]:
    def find(model: CausalLM) -> Any:
        return model.module(0).get_submodule(name)

    return find


MODEL_BUGS: dict[str, tuple[Callable[[CausalLM], None], str]] = {
    "a norm of the trunk": (plain_factor(lambda model: model.norm), TEXT),
    "a norm of a delta layer": (
        plain_factor(lambda model: model.get_submodule("layers.1.input_layernorm")),
        TEXT,
    ),
    "a norm of keys": (
        plain_factor(lambda model: model.get_submodule("layers.0.self_attn.k_norm")),
        TEXT,
    ),
    "a norm of what joins": (plain_factor(module_norm("hnorm")), DRAFTS),
    "the module's last norm": (plain_factor(module_norm("shared_head.norm")), DRAFTS),
    "no gate of attention": (gate_of_attention_dropped, TEXT),
    "recycled in front of its norm": (module_hands_on, DRAFTS),
    "h in front of the final norm": (trunk_in_front_of_its_norm, DRAFTS),
}


@pytest.mark.parametrize("bug", MODEL_BUGS)
def test_wrong_models_are_caught(bug: str) -> None:
    plant, says = MODEL_BUGS[bug]
    with pytest.raises(AssertionError, match=f"^({says})"):
        check_family(make_family(SOME), 2, "mtp-eagle", plant)


def test_an_idle_slot_that_decays_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    advanced("delta", lambda n, T: n.clamp(min=1))(monkeypatch)
    with pytest.raises(AssertionError):
        test_states_of_slots_that_idle()


def test_layers_are_of_both_kinds() -> None:
    model = lower(make_family("qwen3.5"))
    kinds = [isinstance(layer, DeltaLayer) for layer in model.layers]
    assert kinds == [True, True, True, False]
    assert set(HYBRIDS) >= {"qwen3.5", "qwen3-next"}
