"""Architectures of GGUF files: what their tensors are called, and what converters changed.

Converters of Qwen's models change values: norms are factors, the decay is a rate, and value heads
that share a key head are tiled. Here that is undone.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mtpbuild.builder.checkpoint.config import COUNT_LIMIT
from mtpbuild.builder.gguf.configs import Config, make_latent_reader, read_grouped, read_hybrid
from mtpbuild.builder.gguf.container import Floats, GgufFile, RawTensor
from mtpbuild.builder.gguf.mapped import Change, GgufWeight, Order, Tiles
from mtpbuild.runtime.errors import CheckpointError

BLOCK = re.compile(r"blk\.(\d{1,9})\.(.+)")
STACK = re.compile(r"ffn_(gate|up|down|gate_up)_exps\.weight")
UNUSED = ("rope_freqs.weight", ".input_scale")
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Tensors of a layer: GGUF's names and the checkpoint's, without `.weight` and `.bias`.
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
}
LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
}
SHARED = {f"ffn_{x}_shexp": f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")}
MODULE = {
    **{f"nextn.{x}": x for x in ("eh_proj", "embed_tokens", "enorm", "hnorm")},
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    **{f"ffn_{x}_shexp": f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
DELTA_MODULE = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}
WHOLE = {  # with their endings
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
# Products that engines of quantised checkpoints keep in floats: routers, and exponents.
AS_FLOATS = re.compile(r".*(in_proj_(a|b|ba)|mlp\.gate|shared_expert_gate)\.weight")


@dataclass(frozen=True)
class Architecture:
    """An architecture: how its config.json is made, and what its layers' tensors are called."""

    config: Callable[[GgufFile], Config]
    names: Mapping[str, str]
    modules: str = ""  # prefix of a module's layer before its number; "": layers after the trunk's
    factors: bool = False  # whether norms hold the factor, which the checkpoint has without its 1
    tiled: bool = False  # whether value heads that share a key head are tiled


_deepseek = LAYER | LATENT | SHARED | MODULE
_qwen = LAYER | DELTA | DELTA_MODULE
ARCHITECTURES = {
    "qwen35": Architecture(read_hybrid, _qwen, "mtp.layers.", factors=True, tiled=True),
    "qwen35moe": Architecture(read_hybrid, _qwen, "mtp.layers.", factors=True, tiled=True),
    "qwen3next": Architecture(read_hybrid, _qwen, "mtp.layers.", factors=True),
    "deepseek2": Architecture(make_latent_reader("deepseek_v3"), _deepseek),
    "deepseek32": Architecture(make_latent_reader("deepseek_v32"), _deepseek),
    "glm-dsa": Architecture(make_latent_reader("glm_moe_dsa"), _deepseek),
    "glm4moe": Architecture(read_grouped, LAYER | SHARED | MODULE),
}


def find_architecture(file: GgufFile) -> Architecture:
    found = ARCHITECTURES.get(file.architecture)
    if found is None:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(
            f"{file.path}: architecture {file.architecture} is not read; supported: {known}"
        )
    return found


def list_weights(file: GgufFile) -> Iterator[GgufWeight]:
    """Yield the weights of a file as the checkpoint has them, under its names.

    A tensor that is unknown keeps its name, so that checking the checkpoint refuses it.
    """
    own, blocks = find_architecture(file), dict[int, dict[str, RawTensor]]()
    for name, tensor in file.tensors.items():
        if match := BLOCK.fullmatch(name):
            blocks.setdefault(int(match[1]), {})[match[2]] = tensor
        elif not name.endswith(UNUSED):
            yield _map_weight(own, TOP.get(name, name), tensor)
    for number, tensors in blocks.items():
        j = number - file.layers
        inside = own.modules and j >= 0
        at = f"{own.modules}{j}" if inside else f"model.layers.{number}"
        if j >= 0:
            _add_norm(file, own, tensors)
        yield from _map_layer(file, own, at, tensors)


def _add_norm(file: GgufFile, own: Architecture, tensors: dict[str, RawTensor]) -> None:
    """Give a module that has no final norm the trunk's."""
    if any(name.startswith("nextn.") for name in tensors):
        tensors.setdefault("nextn.shared_head_norm.weight", file.tensor("output_norm.weight"))


def _map_layer(
    file: GgufFile, own: Architecture, at: str, tensors: dict[str, RawTensor]
) -> Iterator[GgufWeight]:
    """Yield the weights of a layer: those made of several tensors, stacks of experts, the rest."""
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(UNUSED)}
    if "attn_k_b.weight" in tensors and "attn_v_b.weight" in tensors:
        yield _join_kv_heads(at, tensors.pop("attn_k_b.weight"), tensors.pop("attn_v_b.weight"))
    if file.architecture == "qwen3next":
        yield from _map_packed(file, at, tensors)
    for name, tensor in tensors.items():
        if match := STACK.fullmatch(name):
            yield from _split_experts(f"{at}.mlp.experts", match[1], tensor)
            continue
        stem, _, end = name.rpartition(".")
        found = WHOLE.get(name) or (f"{own.names[stem]}.{end}" if stem in own.names else None)
        if found is None:
            yield _map_weight(own, f"{at}.{name}", tensor)
            continue
        full = found if found.startswith("mtp.") else f"{at}.{found}"
        order = _find_tiles(file, name) if own.tiled else {}
        yield _map_weight(own, full, tensor, **order)


def _map_weight(own: Architecture, name: str, tensor: RawTensor, **order: Any) -> GgufWeight:
    """Return a weight made from one tensor, with the values that the checkpoint has."""
    shape = tensor.shape
    change: Change | None = None
    if name.endswith("conv1d.weight") and len(shape) == 2:
        shape = (shape[0], 1, shape[1])
    elif name.endswith("shared_expert_gate.weight") and len(shape) == 1:
        shape = (1, *shape)
    elif name.endswith(".A_log"):
        change = log_of_rate
    elif own.factors and "norm" in name and not name.endswith("linear_attn.norm.weight"):
        change = without_one
    as_floats = AS_FLOATS.fullmatch(name) is not None
    return GgufWeight(name, shape, (tensor,), change=change, as_floats=as_floats, **order)


def _find_tiles(file: GgufFile, name: str) -> dict[str, Any]:
    """Return the order of a tensor's value heads, for those that have any."""
    keys, values = file.key("ssm.group_count"), file.key("ssm.time_step_rank")
    if keys == values:
        return {}
    repeats, width = values // keys, file.key("ssm.inner_size") // values
    before = 2 * keys * file.key("ssm.state_size")
    match name:
        case "attn_qkv.weight" | "ssm_conv1d.weight":
            return {"rows": Tiles(keys, repeats, width, before).grouped}
        case "attn_gate.weight":
            return {"rows": Tiles(keys, repeats, width).grouped}
        case "ssm_alpha.weight" | "ssm_beta.weight":
            return {"rows": Tiles(keys, repeats, 1).grouped}
        case "ssm_a" | "ssm_dt.bias":
            return {"columns": Tiles(keys, repeats, 1)}
        case "ssm_out.weight":
            return {"columns": Tiles(keys, repeats, width)}
    return {}


def _map_packed(file: GgufFile, at: str, tensors: dict[str, RawTensor]) -> Iterator[GgufWeight]:
    """Yield Qwen3-Next's projections, which the checkpoint has one key head after the other."""
    if "ssm_ba.weight" in tensors:
        ba = tensors.pop("ssm_ba.weight")
        yield GgufWeight(f"{at}.linear_attn.in_proj_ba.weight", ba.shape, (ba,), as_floats=True)
    if not {"attn_qkv.weight", "attn_gate.weight"} <= tensors.keys():
        return
    qkv, z = tensors.pop("attn_qkv.weight"), tensors.pop("attn_gate.weight")
    keys, width = file.key("ssm.group_count"), file.key("ssm.state_size")
    each = file.key("ssm.inner_size") // keys  # values of a key head
    _refuse_shape(z, unless=len(qkv.shape) == 2 and z.shape[1:] == qkv.shape[1:])
    shape = (qkv.shape[0] + z.shape[0], qkv.shape[1])
    rows = partial(_join_kinds, keys, (width, width, each, each))
    yield GgufWeight(f"{at}.linear_attn.in_proj_qkvz.weight", shape, (qkv, z), rows=rows)


def _join_kinds(keys: int, sizes: Sequence[int]) -> Order:
    """Return rows that lie kind by kind, in the order of key heads."""
    kinds, start = [], 0
    for size in sizes:
        kinds.append(start + np.arange(keys * size).reshape(keys, size))
        start += keys * size
    return np.concatenate(kinds, axis=1).ravel()


def _refuse_shape(tensor: RawTensor, *, unless: bool) -> None:
    """Raise CheckpointError for a shape from which no weight can be made."""
    if not unless:
        shape = [*tensor.shape]
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name} can't have shape {shape}")


def _split_experts(at: str, kind: str, stack: RawTensor) -> Iterator[GgufWeight]:
    """Yield each expert's weight of a stack; gate and up may be one tensor, the gate first."""
    kinds = ("gate", "up") if kind == "gate_up" else (kind,)
    _refuse_shape(stack, unless=len(stack.shape) == 3 and stack.shape[0] <= COUNT_LIMIT)
    count, rows = stack.shape[0], stack.shape[1] // len(kinds)
    for e in range(count):
        for i, each in enumerate(kinds):
            part = slice(i * rows, (i + 1) * rows)
            name, shape = f"{at}.{e}.{each}_proj.weight", (rows, stack.shape[2])
            yield GgufWeight(name, shape, (stack,), expert=e, part=part)


def _join_kv_heads(at: str, keys: RawTensor, values: RawTensor) -> GgufWeight:
    """Return kv_b_proj [heads * (nope + v), latent]; the file has keys transposed in each head."""
    _refuse_shape(keys, unless=len(keys.shape) == 3)
    heads, rank, nope = keys.shape
    _refuse_shape(values, unless=len(values.shape) == 3 and values.shape[::2] == (heads, rank))
    shape = (heads * (nope + values.shape[1]), rank)
    return GgufWeight(f"{at}.self_attn.kv_b_proj.weight", shape, (keys, values), change=join_heads)


def join_heads(keys: Floats, values: Floats) -> Floats:
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1)


def without_one(factor: Floats) -> Floats:
    """Return a norm's weight: 1 plus it gives the factor again, exactly."""
    return factor - np.float32(1)


def log_of_rate(rate: Floats) -> Floats:
    """Return the logarithms whose exponentials are the rates: -rate is stored.

    Of the floats near the logarithm the one is taken whose exponential is nearest to the rate, so
    that a rate that was made from a float gives it back.
    """
    from mtpbuild.builder.lazy_torch import torch

    wanted = -rate
    middle = np.log(wanted.astype(np.float64)).astype(np.float32)
    near = [middle]
    for direction in (-np.inf, np.inf):
        step = middle
        for _ in range(4):
            step = np.nextafter(step, np.float32(direction))
            near.append(step)
    found = np.stack(near)
    missed = np.abs(torch.from_numpy(found).exp().numpy().astype(np.float64) - wanted)
    best: Floats = np.take_along_axis(found, missed.argmin(0)[None], axis=0)[0]
    return best
