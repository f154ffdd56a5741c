"""Architectures of GGUF files: config.json from their keys, and the names of their tensors.

Converters of Qwen's models change values: norms are factors, the decay is a rate, and value heads
that share a key head are tiled. Here that is undone.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtpbuild.builder.gguf.container import Floats, GgufFile, RawTensor
from mtpbuild.builder.gguf.mapped import Change, Mapped, Order, Tiles
from mtpbuild.runtime.errors import CheckpointError

Config = dict[str, Any]
BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
STACK = re.compile(r"ffn_(gate|up|down|gate_up)_exps\.weight")
UNUSED = ("rope_freqs.weight", ".input_scale")
SIGMOID = 2  # of `expert_gating_func`
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


def sizes(file: GgufFile) -> Config:
    """Return what all architectures have in config.json."""
    embedding = tensor_of(file, "token_embd.weight")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": file.key("embedding_length"),
        "num_hidden_layers": file.layers,
        "num_attention_heads": file.key("attention.head_count"),
        "max_position_embeddings": file.key("context_length"),
        "rms_norm_eps": file.key("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
    }


def experts(file: GgufFile) -> Config:
    """Return the numbers of experts, as DeepSeek and GLM have them."""
    softmax = file.key("expert_gating_func", SIGMOID) != SIGMOID
    dense = file.key("leading_dense_block_count", 0)
    return {
        "intermediate_size": file.key("feed_forward_length"),
        "moe_intermediate_size": file.key("expert_feed_forward_length"),
        "n_routed_experts": file.key("expert_count"),
        "n_shared_experts": file.key("expert_shared_count", 0),
        "num_experts_per_tok": file.key("expert_used_count"),
        "n_group": file.key("expert_group_count", 1),
        "topk_group": file.key("expert_group_used_count", 1),
        "routed_scaling_factor": file.key("expert_weights_scale", 1.0),
        "norm_topk_prob": file.key("expert_weights_norm", False),
        "scoring_func": "softmax" if softmax else "sigmoid",
        "first_k_dense_replace": dense,
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(file.layers)],
        "num_nextn_predict_layers": file.modules,
    }


def latent(kind: str) -> Callable[[GgufFile], Config]:
    """Return the reader of models with latent attention."""

    def config(file: GgufFile) -> Config:
        rope = file.key("rope.dimension_count")
        width = file.key("attention.key_length_mla", file.key("attention.key_length"))
        values = file.key("attention.value_length_mla", file.key("attention.value_length"))
        theta = file.key("rope.freq_base", 10000.0)
        model, name = latent_class(kind, file)
        return {
            "architectures": [name],
            "model_type": model,
            **sizes(file),
            **experts(file),
            "q_lora_rank": file.key("attention.q_lora_rank", 0) or None,
            "kv_lora_rank": file.key("attention.kv_lora_rank"),
            "qk_nope_head_dim": width - rope,
            "qk_rope_head_dim": rope,
            "v_head_dim": values,
            "rope_parameters": {"rope_theta": theta, **yarn(file)},
            **(indexer(file) if kind != "deepseek_v3" else {}),
        }

    return config


def latent_class(kind: str, file: GgufFile) -> tuple[str, str]:
    """Return model_type and class; `deepseek2` is GLM-4.7-Flash's architecture, too."""
    if kind == "deepseek_v3" and str(file.keys.get("tokenizer.ggml.pre", "")).startswith("glm"):
        kind = "glm4_moe_lite"
    names = {
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
        "deepseek_v32": "DeepseekV32ForCausalLM",
        "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    }
    return kind, names[kind]


def indexer(file: GgufFile) -> Config:
    """Return the values of sparse attention; a layer without the indexer's tensors shares one."""
    types = file.key("attention.indexer.types", [])
    if not types:
        own = (f"blk.{i}.indexer.attn_k.weight" in file.tensors for i in range(file.layers))
        types = ["full" if has else "shared" for has in own]
    named = {True: "full", False: "shared"}
    return {
        "index_n_heads": file.key("attention.indexer.head_count"),
        "index_head_dim": file.key("attention.indexer.key_length"),
        "index_topk": file.key("attention.indexer.top_k"),
        "indexer_types": [named.get(each, each) for each in types[: file.layers]],
    }


def yarn(file: GgufFile) -> Config:
    """Return the scaling of positions; converters store mscale_all_dim times 0.1."""
    kind = file.key("rope.scaling.type", "none")
    if kind in ("none", ""):
        return {"rope_type": "default"}
    factor = file.key("rope.scaling.factor", 1.0)
    if kind != "yarn":
        return {"rope_type": kind, "factor": factor}
    scale = round(10 * file.key("rope.scaling.yarn_log_multiplier", 0.0), 6)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": file.key("rope.scaling.original_context_length"),
        "beta_fast": file.key("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": file.key("rope.scaling.yarn_beta_slow", 1.0),
        **({"mscale": scale, "mscale_all_dim": scale} if scale else {}),
    }


def grouped(file: GgufFile) -> Config:
    """Return GLM-4.5's config.json."""
    width = file.key("attention.key_length")
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **sizes(file),
        **experts(file),
        **heads(file),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "rope_theta": file.key("rope.freq_base", 10000.0),
        "partial_rotary_factor": file.key("rope.dimension_count") / width,
    }


def heads(file: GgufFile) -> Config:
    return {
        "num_key_value_heads": file.key("attention.head_count_kv"),
        "head_dim": file.key("attention.key_length"),
    }


def hybrid(file: GgufFile) -> Config:
    """Return the config.json of Qwen3.5 and Qwen3-Next."""
    width, values = file.key("attention.key_length"), file.key("ssm.time_step_rank")
    next_, moe = file.architecture == "qwen3next", file.architecture != "qwen35"
    kind = "qwen3_next" if next_ else "qwen3_5_moe_text" if moe else "qwen3_5_text"
    name = "Qwen3Next" if next_ else "Qwen3_5Moe" if moe else "Qwen3_5"
    routed = {
        "num_experts": file.key("expert_count", 0),
        "num_experts_per_tok": file.key("expert_used_count", 1),
        "moe_intermediate_size": file.key("expert_feed_forward_length", 1),
        "shared_expert_intermediate_size": file.key("expert_shared_feed_forward_length", 0),
        "norm_topk_prob": file.key("expert_weights_norm", True),
    }
    theta, rotated = file.key("rope.freq_base", 10000.0), file.key("rope.dimension_count")
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": kind,
        **sizes(file),
        **heads(file),
        "intermediate_size": file.key("feed_forward_length", 0) or 1,
        "full_attention_interval": file.key("full_attention_interval", 4),
        "linear_conv_kernel_dim": file.key("ssm.conv_kernel"),
        "linear_key_head_dim": file.key("ssm.state_size"),
        "linear_num_key_heads": file.key("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": file.key("ssm.inner_size") // values,
        **(routed if moe else {}),
        "mtp_num_hidden_layers": file.modules,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": rotated / width,
        },
    }


_deepseek = LAYER | LATENT | SHARED | MODULE
_qwen = LAYER | DELTA | DELTA_MODULE
ARCHITECTURES = {
    "qwen35": Architecture(hybrid, _qwen, "mtp.layers.", factors=True, tiled=True),
    "qwen35moe": Architecture(hybrid, _qwen, "mtp.layers.", factors=True, tiled=True),
    "qwen3next": Architecture(hybrid, _qwen, "mtp.layers.", factors=True),
    "deepseek2": Architecture(latent("deepseek_v3"), _deepseek),
    "deepseek32": Architecture(latent("deepseek_v32"), _deepseek),
    "glm-dsa": Architecture(latent("glm_moe_dsa"), _deepseek),
    "glm4moe": Architecture(grouped, LAYER | SHARED | MODULE),
}


def architecture_of(file: GgufFile) -> Architecture:
    found = ARCHITECTURES.get(file.architecture)
    if found is None:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(
            f"{file.path}: architecture {file.architecture} is not read; supported: {known}"
        )
    return found


def tensor_of(file: GgufFile, name: str) -> RawTensor:
    if name not in file.tensors:
        raise CheckpointError(f"{file.path}: missing tensor {name}")
    return file.tensors[name]


def list_weights(file: GgufFile) -> Iterator[Mapped]:
    """Yield the weights of a file as the checkpoint has them, under its names.

    A tensor that is unknown keeps its name, so that checking the checkpoint refuses it.
    """
    own, blocks = architecture_of(file), dict[int, dict[str, RawTensor]]()
    for name, tensor in file.tensors.items():
        if match := BLOCK.fullmatch(name):
            blocks.setdefault(int(match[1]), {})[match[2]] = tensor
        elif not name.endswith(UNUSED):
            yield _weight(own, TOP.get(name, name), tensor)
    for number, tensors in blocks.items():
        j = number - file.layers
        inside = own.modules and j >= 0
        at = f"{own.modules}{j}" if inside else f"model.layers.{number}"
        if j >= 0:
            _add_norm(file, own, tensors)
        yield from _layer(file, own, at, tensors)


def _add_norm(file: GgufFile, own: Architecture, tensors: dict[str, RawTensor]) -> None:
    """Give a module that has no final norm the trunk's."""
    if any(name.startswith("nextn.") for name in tensors):
        tensors.setdefault("nextn.shared_head_norm.weight", tensor_of(file, "output_norm.weight"))


def _layer(
    file: GgufFile, own: Architecture, at: str, tensors: dict[str, RawTensor]
) -> Iterator[Mapped]:
    """Yield the weights of a layer: those made of several tensors, stacks of experts, the rest."""
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(UNUSED)}
    if "attn_k_b.weight" in tensors and "attn_v_b.weight" in tensors:
        yield _joined_heads(at, tensors.pop("attn_k_b.weight"), tensors.pop("attn_v_b.weight"))
    if file.architecture == "qwen3next":
        yield from _packed(file, at, tensors)
    for name, tensor in tensors.items():
        if match := STACK.fullmatch(name):
            yield from _experts(f"{at}.mlp.experts", match[1], tensor)
            continue
        stem, _, end = name.rpartition(".")
        found = WHOLE.get(name) or (f"{own.names[stem]}.{end}" if stem in own.names else None)
        if found is None:
            yield _weight(own, f"{at}.{name}", tensor)
            continue
        full = found if found.startswith("mtp.") else f"{at}.{found}"
        order = _tiles(file, name) if own.tiled else {}
        yield _weight(own, full, tensor, **order)


def _weight(own: Architecture, name: str, tensor: RawTensor, **order: Any) -> Mapped:
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
    return Mapped(name, shape, (tensor,), change=change, as_floats=as_floats, **order)


def _tiles(file: GgufFile, name: str) -> dict[str, Order | Tiles]:
    """Return the order of a tensor's value heads, for those that have any."""
    keys, values = file.key("ssm.group_count"), file.key("ssm.time_step_rank")
    if keys == values:
        return {}
    repeats, width = values // keys, file.key("ssm.inner_size") // values
    before = 2 * keys * file.key("ssm.state_size")
    match name:
        case "attn_qkv.weight" | "ssm_conv1d.weight":
            return {"rows": Tiles(keys, repeats, width, before).grouped()}
        case "attn_gate.weight":
            return {"rows": Tiles(keys, repeats, width).grouped()}
        case "ssm_alpha.weight" | "ssm_beta.weight":
            return {"rows": Tiles(keys, repeats, 1).grouped()}
        case "ssm_a" | "ssm_dt.bias":
            return {"columns": Tiles(keys, repeats, 1)}
        case "ssm_out.weight":
            return {"columns": Tiles(keys, repeats, width)}
    return {}


def _packed(file: GgufFile, at: str, tensors: dict[str, RawTensor]) -> Iterator[Mapped]:
    """Yield Qwen3-Next's projections, which the checkpoint has one key head after the other."""
    if "ssm_ba.weight" in tensors:
        ba = tensors.pop("ssm_ba.weight")
        yield Mapped(f"{at}.linear_attn.in_proj_ba.weight", ba.shape, (ba,), as_floats=True)
    if not {"attn_qkv.weight", "attn_gate.weight"} <= tensors.keys():
        return
    qkv, z = tensors.pop("attn_qkv.weight"), tensors.pop("attn_gate.weight")
    keys, width = file.key("ssm.group_count"), file.key("ssm.state_size")
    each = file.key("ssm.inner_size") // keys  # values of a key head
    kinds, start = [], 0
    for size in (width, width, each, each):
        kinds.append(start + np.arange(keys * size).reshape(keys, size))
        start += keys * size
    rows = np.concatenate(kinds, axis=1).ravel()
    shape = (qkv.shape[0] + z.shape[0], qkv.shape[1])
    yield Mapped(f"{at}.linear_attn.in_proj_qkvz.weight", shape, (qkv, z), rows=rows)


def _experts(at: str, kind: str, stack: RawTensor) -> Iterator[Mapped]:
    """Yield each expert's weight of a stack; gate and up may be one tensor, the gate first."""
    kinds = ("gate", "up") if kind == "gate_up" else (kind,)
    count, rows = stack.shape[0], stack.shape[1] // len(kinds)
    for e in range(count):
        for i, each in enumerate(kinds):
            part = slice(i * rows, (i + 1) * rows)
            name, shape = f"{at}.{e}.{each}_proj.weight", (rows, stack.shape[2])
            yield Mapped(name, shape, (stack,), expert=e, part=part)


def _joined_heads(at: str, keys: RawTensor, values: RawTensor) -> Mapped:
    """Return kv_b_proj [heads * (nope + v), latent]; the file has keys transposed in each head."""
    heads, rank, nope = keys.shape
    shape = (heads * (nope + values.shape[1]), rank)
    return Mapped(f"{at}.self_attn.kv_b_proj.weight", shape, (keys, values), change=join_heads)


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
