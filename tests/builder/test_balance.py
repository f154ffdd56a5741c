"""Keys and queries balanced for int8 caches: the model says the same, and rows lose less."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpbuild.builder.compiler.refit import refit
from mtpbuild.builder.formats import FORMATS
from mtpbuild.builder.formats.integers import SHIFTED
from mtpbuild.builder.models.common.grouped_config import GroupedConfig
from mtpbuild.builder.models.common.plain import PlainCausalLM
from mtpbuild.builder.weights.balance import BalancedReader
from mtpbuild.builder.weights.checkpoint import Checkpoint
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.builder.weights.quantised_view import requantise
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.runtime.contract.manifest import WEIGHTS
from tests.support.families import make_family, save_family
from tests.support.invoke import invoke
from tests.support.requests import build, build_request

TIMES = 30.0  # the largest pair of Qwen2.5's keys over the median one


@torch.no_grad()
def spread_keys(plain: PlainCausalLM, config: GroupedConfig) -> None:
    """Make one pair of each key head as large as Qwen2's biases make theirs."""
    weights = dict(plain.named_parameters())
    for name, weight in weights.items():
        if name.endswith(("k_proj.bias", "k_norm.weight")):
            product = name.replace("k_norm", "k_proj").replace("bias", "weight")
            usual = weights[product].norm(dim=1).median() if "bias" in name else weight.median()
            heads = weight.view(-1, config.head_dim)
            heads[:, 1 :: config.rotary_dim // 2][:, :2] += TIMES * usual


def save_spread(
    folder: Path, name: str, **overrides: int
) -> tuple[PlainCausalLM, Checkpoint, BalancedReader]:
    plain = make_family(name, **overrides)
    config = plain.config
    assert isinstance(config, GroupedConfig)
    spread_keys(plain, config)
    checkpoint = open_checkpoint(save_family(folder / name, name, plain, **overrides))
    return plain, checkpoint, BalancedReader(checkpoint, checkpoint, config)


def compute_logits(plain: PlainCausalLM) -> list[Tensor]:
    """Return the logits of the trunk and of its first module, if it has one."""
    tokens = torch.arange(3, 40)[None]
    hidden = plain.main(tokens)
    logits = [plain.logits(hidden)]
    if plain.config.num_nextn_predict_layers:
        logits.append(plain.draft_logits(1, plain.mtp(1, tokens[:, 1:], hidden[:, :-1])))
    return logits


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "glm-4.6", "qwen3.5", "mimo"])
@torch.no_grad()
def test_scores_do_not_change(name: str, tmp_path: Path) -> None:
    plain, _, reader = save_spread(tmp_path, name)
    before = compute_logits(plain)
    changed = 0
    for weight_name, weight in plain.named_parameters():
        if reader.find_factors(weight_name) is not None:
            changed += not torch.equal(weight, balanced := reader.read(weight_name))
            weight.copy_(balanced)
    assert changed >= 2 or name == "llama"  # which has neither biases nor norms
    for one, other in zip(before, compute_logits(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def lose(rows: Tensor) -> Tensor:
    """Round rows [.., D] as an int8 cache does."""
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / scale).round() * scale


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@torch.no_grad()
def test_rounded_rows_lose_less(name: str, tmp_path: Path) -> None:
    """Errors of scores fall by a third or more."""
    plain, _, reader = save_spread(tmp_path, name)
    attention: Any = plain.model.layers[0].get_submodule("self_attn")
    config = plain.config
    assert isinstance(config, GroupedConfig)
    x = torch.randn(50, config.hidden_size)
    D, shared = config.head_dim, config.num_key_value_heads

    def measure_error() -> float:
        q, k = (p(x).unflatten(-1, (-1, D)) for p in (attention.q_proj, attention.k_proj))
        if config.use_qk_norm:
            q, k = attention.q_norm(q), attention.k_norm(k)
        k = k.repeat_interleave(q.shape[1] // shared, dim=1)
        wanted, scores = ((a @ b.mT) for a, b in ((q, k), (lose(q), lose(k))))
        return float((wanted - scores).square().mean().sqrt())

    before = measure_error()
    for part, weight in attention.named_parameters():
        weight.copy_(reader.read(f"model.layers.0.self_attn.{part}"))
    assert measure_error() < 0.7 * before


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_scales_are_balanced_exactly(format: str, tmp_path: Path) -> None:
    _, checkpoint, reader = save_spread(tmp_path, "qwen2", hidden_size=96)
    config = reader.config
    stored = checkpoint.check(checkpoint.settle(config)).stored.values()
    scheme = build_scheme(format)
    assert scheme is not None
    view = requantise(checkpoint, config, scheme, stored)
    name = "model.layers.0.self_attn.k_proj.weight"
    balanced = BalancedReader(view, checkpoint, config)
    factors = balanced.find_factors(name)
    assert factors is not None
    assert len(factors.unique()) > 1
    for kept in (FORMATS[format], SHIFTED[FORMATS[format].bits]):
        one, other = (source.read_engine_parts(name, kept) for source in (view, balanced))
        before, after = kept.decode(one), kept.decode(other)
        torch.testing.assert_close(before * factors[:, None], after, rtol=0, atol=0)


@pytest.mark.usefixtures("quick")
def test_an_engine_says_that_its_keys_are_balanced(tmp_path: Path) -> None:
    """Engines of int8 caches alone have balanced keys, and keep them when they are refitted."""
    _, checkpoint, _ = save_spread(tmp_path, "qwen2", hidden_size=96)
    weights = list[bytes]()
    for cache in ("float32", "int8"):
        request = build_request(
            checkpoint.folder, (0,), weights="int8", cache_dtype=cache, out=tmp_path / cache
        )
        (built,) = build(request)
        assert built.manifest.build.balanced_keys == (cache == "int8")
        assert (", keys balanced" in invoke("inspect", built.folder)[1]) == (cache == "int8")
        weights.append((built.folder / WEIGHTS).read_bytes())
    assert weights[0] != weights[1]
    _, after = refit(tmp_path / "int8", str(checkpoint.folder))
    assert after.build.balanced_keys
    assert (tmp_path / "int8" / WEIGHTS).read_bytes() == weights[1]
