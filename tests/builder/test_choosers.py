"""Attention to the rows that an indexer chooses: the module's formula, and planted bugs.

`test_families.py` compares logits, texts and drafts with transformers and recomputation.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from mtpbuild.builder.checkpoint.layers_slice import parse_layers
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.layers import Positions
from mtpbuild.builder.models.common.plain import PlainCausalLM
from mtpbuild.builder.models.deepseek_v32.config import DeepseekV32Config
from mtpbuild.builder.models.deepseek_v32.model import SparseAttention
from mtpbuild.plugins import take_rows
from mtpbuild.runtime.errors import UsageError
from tests.support.families import CHOOSERS, make_config, make_family, save_family
from tests.support.forced import COUNT, DRAFTS, ROWS, TOKENS
from tests.support.steps import check_family

ATOL = 2e-4
TEXT = f"{TOKENS}|{COUNT}|{ROWS}"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_a_module_equals_what_is_written_out_here(tmp_path: Path) -> None:
    """It chooses rows for itself; the last tokens, later drafts, attend to those of one before."""
    ours = make_family("glm-5")
    w = load_file(save_family(tmp_path / "m", "glm-5", ours) / "model.safetensors")
    c, at, T, later = make_config("glm-5"), "model.layers.3.", 30, 2
    H, n, R, v = (
        c[key]
        for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    heads, size, r = c["index_n_heads"], c["index_head_dim"], c["kv_lora_rank"]
    tokens = torch.from_numpy(np.random.default_rng(2).integers(0, 61, T))
    hidden = torch.randn(T, c["hidden_size"])

    def of(name: str) -> Tensor:
        return w[f"{at}{name}.weight"]

    def norm(x: Tensor, name: str, eps: float = 1e-5) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * of(name)

    def turned(x: Tensor, t: int) -> Tensor:
        """Turn the first R numbers, neighbours together, by the angles of position t."""
        y = x.clone()
        for i in range(R // 2):
            angle = torch.tensor(t * 1e6 ** (-2 * i / R))
            a, b = x[..., 2 * i], x[..., 2 * i + 1]
            y[..., 2 * i] = a * angle.cos() - b * angle.sin()
            y[..., 2 * i + 1] = b * angle.cos() + a * angle.sin()
        return y

    def chosen(x: Tensor, latent: Tensor) -> list[list[int]]:
        made = x @ of("self_attn.indexer.wk").T
        deviation = (made.var(-1, keepdim=True, correction=0) + 1e-6).sqrt()
        keys = (made - made.mean(-1, keepdim=True)) / deviation * of("self_attn.indexer.k_norm")
        keys = keys + w[f"{at}self_attn.indexer.k_norm.bias"]
        keys = torch.stack([turned(keys[t], t) for t in range(T)])
        weights = x @ of("self_attn.indexer.weights_proj").T / heads**0.5
        found = []
        for t in range(T):
            q = turned((latent[t] @ of("self_attn.indexer.wq_b").T).reshape(heads, size), t)
            scores = weights[t] @ (q @ keys[: t + 1].T / size**0.5).clamp(min=0)
            found.append(scores.topk(min(t + 1, c["index_topk"])).indices.tolist())
        return found

    def attention(x: Tensor) -> Tensor:
        latent = norm(x @ of("self_attn.q_a_proj").T, "self_attn.q_a_layernorm", 1e-6)
        rows = chosen(x, latent)
        rows[-later:] = [rows[-later - 1]] * later
        both = x @ of("self_attn.kv_a_proj_with_mqa").T
        kv = norm(both[:, :r], "self_attn.kv_a_layernorm", 1e-6) @ of("self_attn.kv_b_proj").T
        kv = kv.reshape(T, H, n + v)
        out = torch.zeros(T, H, v)
        for t in range(T):
            q = (latent[t] @ of("self_attn.q_b_proj").T).reshape(H, n + R)
            for head in range(H):
                query = torch.cat([q[head, :n], turned(q[head, n:], t)])
                keys = [torch.cat([kv[s, head, :n], turned(both[s, r:], s)]) for s in rows[t]]
                p = (torch.stack(keys) @ query / (n + R) ** 0.5).softmax(0)
                out[t, head] = p @ kv[rows[t], head, n:]
        return out.flatten(1) @ of("self_attn.o_proj").T

    def gated(x: Tensor, name: str) -> Tensor:
        inner = F.silu(x @ of(f"{name}.gate_proj").T) * (x @ of(f"{name}.up_proj").T)
        return inner @ of(f"{name}.down_proj").T

    def experts(x: Tensor) -> Tensor:
        scores = (x @ of("mlp.gate").T).sigmoid()
        y = gated(x, "mlp.shared_experts")
        for t in range(T):
            best = (scores[t] + w[f"{at}mlp.gate.e_score_correction_bias"]).topk(2).indices
            for e in best.tolist():
                share = 1.8 * scores[t, e] / scores[t, best].sum()
                y[t] += share * gated(x[t], f"mlp.experts.{e}")
        return y

    halves = [norm(w["model.embed_tokens.weight"][tokens], "enorm"), norm(hidden, "hnorm")]
    x = torch.cat(halves, -1) @ of("eh_proj").T
    x = x + attention(norm(x, "input_layernorm"))
    recycled = norm(x + experts(norm(x, "post_attention_layernorm")), "shared_head.norm")
    with torch.no_grad():
        g = ours.mtp(1, tokens[None], hidden[None], later=later)
        assert (g[0] - recycled).abs().max() < ATOL
        logits = recycled @ w["lm_head.weight"].T
        assert (ours.draft_logits(1, g)[0] - logits).abs().max() < ATOL


Bug = Callable[[CausalLM], None]


def choosers(model: CausalLM) -> list[SparseAttention]:
    """Return the attention of all layers and modules that choose rows."""
    layers: list[Any] = [*model.layers, *model.mtp]
    found = [layer.self_attn for layer in layers]
    return [each for each in found if each.indexer is not None]


def chooses(wrong: Callable[..., Tensor]) -> Bug:
    """Let every indexer choose otherwise: by wrong(its choice, operands)."""

    def plant(model: CausalLM) -> None:
        for attention in choosers(model):
            indexer: Any = attention.indexer
            indexer.choose = partial(wrong, indexer.choose)

    return plant


def newest_committed_row_is_none(choose: Any, *given: Any) -> Tensor:
    """Choose with an off-by-one: the last row before the window may not be chosen."""
    found, rows = choose(*given), given[2]
    return found.masked_fill(found == rows.base[:, None, None] - 1, -1)


def moved(by: int) -> Callable[..., Tensor]:
    """Off-by-ones: a token may choose rows before its own alone, or a later one of the window."""
    return lambda choose, *given: choose(*given[:-1], given[-1] + by)


def rejected_rows(model: CausalLM) -> None:
    """Rows behind the committed ones may be chosen, too: of the module, what was rejected."""
    attention: Any = model.module(0).self_attn
    attend = attention.attend

    def wrong(q: Tensor, rows: Positions, *others: Tensor) -> Tensor:
        if rows.choice.stays or rows.positions.shape[1] > 1:
            return attend(q, rows, *others)
        return attend(q, replace(rows, base=rows.base + 1), *others)

    attention.attend = wrong


def the_trunks_choice(model: CausalLM) -> None:
    """Check that the module's first draft attends to the rows that the last layer has chosen."""
    trunk: Any = model.layers[-1].self_attn
    module: Any = model.module(0).self_attn
    attend, own, seen = trunk.attend, module.attend, list[Tensor]()

    def remembering(q: Tensor, rows: Positions, *others: Tensor) -> Tensor:
        y = attend(q, rows, *others)
        assert rows.choice.rows is not None
        seen[:] = [rows.choice.rows]
        return y

    def taking(q: Tensor, rows: Positions, cache: Tensor, fresh: Tensor, first: Tensor) -> Tensor:
        if seen:
            rows.choice.rows, rows.choice.stays = take_rows(seen.pop(), first, 1), True
        return own(q, rows, cache, fresh, first)

    trunk.attend, module.attend = remembering, taking


def shares(value: bool) -> Bug:
    """Later drafts take the first one's choice, or choose for themselves."""

    def plant(model: CausalLM) -> None:
        model.config = replace(model.config, mtp=replace(model.config.mtp, shares_choice=value))

    return plant


def neighbours_rotate(value: bool) -> Bug:
    def plant(model: CausalLM) -> None:
        for attention in choosers(model):
            indexer: Any = attention.indexer
            indexer.config = replace(indexer.config, indexer_rope_interleave=value)

    return plant


def keys_without_bias(model: CausalLM) -> None:
    for attention in choosers(model):
        assert attention.indexer is not None
        attention.indexer.k_norm.bias.zero_()


def layer_without_an_indexer_sees_all(model: CausalLM) -> None:
    attention: Any = model.layers[2].self_attn
    attend = attention.attend

    def wrong(q: Tensor, rows: Positions, *others: Tensor) -> Tensor:
        return attend(q, replace(rows, choice=type(rows.choice)()), *others)

    attention.attend = wrong


V32, GLM = CHOOSERS
EITHER = f"{TEXT}|{DRAFTS}"
BUGS: list[tuple[str, Bug, str]] = [
    (V32, chooses(newest_committed_row_is_none), EITHER),
    (V32, chooses(moved(-1)), EITHER),
    (V32, chooses(moved(1)), EITHER),
    (V32, rejected_rows, DRAFTS),
    (V32, the_trunks_choice, DRAFTS),
    (V32, shares(True), DRAFTS),
    (V32, neighbours_rotate(True), EITHER),
    (V32, keys_without_bias, EITHER),
    (GLM, layer_without_an_indexer_sees_all, EITHER),
]
MORE_BUGS: list[tuple[str, Bug, str]] = [
    (GLM, the_trunks_choice, DRAFTS),
    (GLM, shares(False), DRAFTS),
    (GLM, neighbours_rotate(False), EITHER),
]
CAUGHT = [*BUGS, *(pytest.param(*bug, marks=pytest.mark.full) for bug in MORE_BUGS)]


@pytest.mark.parametrize(("name", "bug", "says"), CAUGHT, ids=range(len(CAUGHT)))
def test_the_oracle_catches(name: str, bug: Bug, says: str) -> None:
    with pytest.raises(AssertionError, match=f"(?m)^({says})"):
        check_family(make_family(name), 3, "mtp-eagle", bug)


def all_scores_equal(name: str) -> PlainCausalLM:
    """Make a model whose rows all tie: the lowest positions win."""
    model = make_family(name)
    for key, weight in model.named_parameters():
        if key.endswith("weights_proj.weight"):
            weight.data.zero_()
    return model


def the_newest_of_equal_rows(choose: Any, *given: Any) -> Tensor:
    """Of equal scores those count that arrived last."""
    found, rows, first = choose(*given), given[2], given[-1]
    count, T = found.shape[-1], found.shape[1]
    newest = (rows.base + first)[:, None] + torch.arange(T)
    return (newest[..., None] - torch.arange(count)).clamp(min=-1)


def test_ties() -> None:
    model = all_scores_equal(V32)
    check_family(model, 1, "mtp-eagle")
    with pytest.raises(AssertionError, match=f"(?m)^({EITHER})"):
        check_family(model, 1, "mtp-eagle", chooses(the_newest_of_equal_rows))


def test_which_layers_choose() -> None:
    def chosen(**said: Any) -> tuple[bool, ...]:
        config = make_family(GLM, num_hidden_layers=9, indexer_types=None, **said).config
        assert isinstance(config, DeepseekV32Config)
        return config.indexers

    assert chosen() == (True,) * 9
    letters = "FFFSSSFSS"
    assert chosen(index_topk_pattern=letters) == tuple(letter == "F" for letter in letters)
    by_rule = chosen(index_topk_freq=4, index_skip_topk_offset=3)
    assert by_rule == (True, True, True, False, False, False, True, False, False)
    config = make_family(GLM).config
    assert config.sliced(1, 2).num_hidden_layers == 2
    with pytest.raises(UsageError, match="--layers 2-2 begins with a layer that takes an earlier"):
        parse_layers("2-2").of(config)
