"""Writes GGUF files of checkpoints with the changes that llama.cpp's converters make."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Type

from mtpbuild.builder.models import load_config
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.builder.weights.stored import Checkpoint
from tests.support.families import make_config, make_family

# Rows are whole blocks of 32.
SMALL: dict[str, dict[str, Any]] = {
    "qwen3.5": {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_value_heads": 6,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
LATENT = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "gigachat": LATENT,
    "glm-flash": LATENT,
    "deepseek-v3.2": LATENT | {"index_head_dim": 32},
    "glm-5": LATENT | {"index_head_dim": 32},
    "glm-air": {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32},
    "glm-4.6": {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64},
    },
    "qwen3.5-moe": SMALL["qwen3.5"]
    | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "qwen3-next": SMALL["qwen3.5"]
    | {
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "mlp_only_layers": [],
    },
}  # fmt: skip
Array = npt.NDArray[np.float32]
Read = Callable[[str], Array]  # a tensor of the checkpoint, by name
TypeOf = Callable[[str, Array], Type]
ARCHITECTURES = {
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next",
    "deepseek_v3": "deepseek2", "glm4_moe_lite": "deepseek2", "deepseek_v32": "deepseek32",
    "glm_moe_dsa": "glm-dsa", "glm4_moe": "glm4moe",
}  # fmt: skip
HYBRID = {"qwen35", "qwen35moe", "qwen3next"}
MLP = ("gate", "up", "down")


def modules_of(c: dict[str, Any]) -> int:
    return int(c.get("mtp_num_hidden_layers", c.get("num_nextn_predict_layers", 0)))


def converted(c: dict[str, Any], names: set[str], read: Read) -> Iterator[tuple[str, Array]]:
    """Yield all tensors as a converter gives them; name: of the checkpoint's tensors."""
    arch, layers = ARCHITECTURES[c["model_type"]], c["num_hidden_layers"]
    one = 1 if arch in HYBRID else 0
    yield "token_embd.weight", read("model.embed_tokens.weight")
    yield "output_norm.weight", read("model.norm.weight") + np.float32(one)
    if not c.get("tie_word_embeddings"):
        yield "output.weight", read("lm_head.weight")
    for i in range(layers + modules_of(c)):
        at, module = f"model.layers.{i}", i >= layers
        if module and arch in HYBRID:
            at = f"mtp.layers.{i - layers}"
        own = {name.removeprefix(f"{at}."): name for name in names if name.startswith(f"{at}.")}
        for name, value in layer(c, arch, own, read):
            yield f"blk.{i}.{name}", value
        if module and arch in HYBRID:
            yield f"blk.{i}.nextn.eh_proj.weight", read("mtp.fc.weight")
            norms = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
            for to, name in (norms | {"shared_head_norm": "norm"}).items():
                yield f"blk.{i}.nextn.{to}.weight", read(f"mtp.{name}.weight") + np.float32(1)


def layer(
    c: dict[str, Any], arch: str, own: dict[str, str], read: Read
) -> Iterator[tuple[str, Array]]:
    """Yield a layer's tensors; own: its names in the layer -> in the checkpoint."""
    one, next_norm = np.float32(arch in HYBRID), "ffn_norm"
    if arch in {*HYBRID, "glm4moe"}:
        next_norm = "post_attention_norm"
    simple = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": next_norm,
        "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
        "self_attn.o_proj": "attn_output", "mlp.gate": "ffn_gate_inp",
        **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
        **{f"mlp.{x}_proj": f"ffn_{x}" for x in MLP},
        **{f"mlp.shared_expert.{x}_proj": f"ffn_{x}_shexp" for x in MLP},
        **{f"mlp.shared_experts.{x}_proj": f"ffn_{x}_shexp" for x in MLP},
        "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b",
        "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.indexer.wk": "indexer.attn_k",
        "self_attn.indexer.wq_b": "indexer.attn_q_b", "self_attn.indexer.k_norm": "indexer.k_norm",
        "self_attn.indexer.weights_proj": "indexer.proj", "eh_proj": "nextn.eh_proj",
        "enorm": "nextn.enorm", "hnorm": "nextn.hnorm",
        "shared_head.norm": "nextn.shared_head_norm",
    }  # fmt: skip
    for name, full in own.items():
        stem, _, end = name.rpartition(".")
        if stem in simple:
            value = read(full)
            yield f"{simple[stem]}.{end}", value + one if stem.endswith("norm") else value
    if "mlp.experts.0.up_proj.weight" in own:
        count = c.get("n_routed_experts") or c["num_experts"]
        for x in MLP:
            each = (read(own[f"mlp.experts.{e}.{x}_proj.weight"]) for e in range(count))
            yield f"ffn_{x}_exps.weight", np.stack([*each])
    if (bias := "mlp.gate.e_score_correction_bias") in own:
        yield "exp_probs_b.bias", read(own[bias])
    if (gate := "mlp.shared_expert_gate.weight") in own:
        yield "ffn_gate_inp_shexp.weight", read(own[gate])[0]
    if (kv := "self_attn.kv_b_proj.weight") in own:
        nope, values = c["qk_nope_head_dim"], c["v_head_dim"]
        heads = read(own[kv]).reshape(-1, nope + values, c["kv_lora_rank"])
        yield "attn_k_b.weight", np.ascontiguousarray(heads[:, :nope].transpose(0, 2, 1))
        yield "attn_v_b.weight", heads[:, nope:]
    if "linear_attn.A_log" in own:
        yield from delta_rule(c, arch, lambda name: read(own[f"linear_attn.{name}"]))


def delta_rule(c: dict[str, Any], arch: str, read: Read) -> Iterator[tuple[str, Array]]:
    """Yield a delta rule's tensors; only Qwen3.5's value heads are tiled."""
    keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
    width, key_width, each = c["linear_value_head_dim"], c["linear_key_head_dim"], values // keys

    def tiled(value: Array, size: int) -> Array:
        """Head j * each + r goes to place r * keys + j; on the first axis."""
        if arch == "qwen3next":
            return value
        heads = value.reshape(keys, each, size, -1)
        return np.concatenate([heads[j, r] for r in range(each) for j in range(keys)]).reshape(
            value.shape
        )

    def mixed(value: Array) -> Array:
        """Tiles the values, which follow queries and keys."""
        start = 2 * keys * key_width
        return np.concatenate([value[:start], tiled(value[start:], width)])

    if arch == "qwen3next":
        both, size = read("in_proj_qkvz.weight"), 2 * key_width + 2 * each * width
        heads = both.reshape(keys, size, -1)
        cuts = np.cumsum([key_width, key_width, each * width])
        q, k, v, z = (p.reshape(-1, both.shape[1]) for p in np.split(heads, cuts, axis=1))
        yield "attn_qkv.weight", np.concatenate([q, k, v])
        yield "attn_gate.weight", z
        yield "ssm_ba.weight", read("in_proj_ba.weight")
    else:
        yield "attn_qkv.weight", mixed(read("in_proj_qkv.weight"))
        yield "attn_gate.weight", tiled(read("in_proj_z.weight"), width)
        yield "ssm_beta.weight", tiled(read("in_proj_b.weight"), 1)
        yield "ssm_alpha.weight", tiled(read("in_proj_a.weight"), 1)
    yield "ssm_conv1d.weight", mixed(read("conv1d.weight")[:, 0])
    yield "ssm_dt.bias", tiled(read("dt_bias"), 1)
    yield "ssm_a", tiled(-torch.from_numpy(read("A_log")).exp().numpy(), 1)
    yield "ssm_norm.weight", read("norm.weight")
    yield "ssm_out.weight", np.ascontiguousarray(tiled(read("out_proj.weight").T, width).T)


def write_keys(writer: gguf.GGUFWriter, c: dict[str, Any]) -> None:
    arch, modules = ARCHITECTURES[c["model_type"]], modules_of(c)
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"] + modules)
    if modules:
        writer.add_nextn_predict_layers(modules)
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_rope_freq_base(float(rope.get("rope_theta") or c.get("rope_theta") or 10000))
    write_scaling(writer, arch, rope)
    if "intermediate_size" in c:
        writer.add_feed_forward_length(c["intermediate_size"])
    if experts := c.get("n_routed_experts") or c.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(c["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
    if arch in HYBRID or arch == "glm4moe":
        part = rope.get("partial_rotary_factor") or c.get("partial_rotary_factor", 0.25)
        writer.add_head_count_kv(c["num_key_value_heads"])
        writer.add_key_length(c["head_dim"])
        writer.add_value_length(c["head_dim"])
        writer.add_rope_dimension_count(int(c["head_dim"] * part))
    if arch in HYBRID:
        writer.add_uint32(f"{arch}.full_attention_interval", c.get("full_attention_interval", 4))
        writer.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
        writer.add_ssm_inner_size(c["linear_num_value_heads"] * c["linear_value_head_dim"])
        writer.add_ssm_state_size(c["linear_key_head_dim"])
        writer.add_ssm_time_step_rank(c["linear_num_value_heads"])
        writer.add_ssm_group_count(c["linear_num_key_heads"])
        if experts:
            shared = c["shared_expert_intermediate_size"]
            writer.add_expert_shared_feed_forward_length(shared)
        return
    writer.add_leading_dense_block_count(c["first_k_dense_replace"])
    writer.add_expert_shared_count(c["n_shared_experts"])
    writer.add_expert_weights_scale(c["routed_scaling_factor"])
    writer.add_expert_weights_norm(c["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(c["n_group"])
    writer.add_expert_group_used_count(c["topk_group"])
    if arch == "glm4moe":
        return
    rank, rotary = c["kv_lora_rank"], c["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rotary)
    writer.add_value_length(rank)
    writer.add_key_length_mla(c["qk_nope_head_dim"] + rotary)
    writer.add_value_length_mla(c["v_head_dim"])
    if c.get("q_lora_rank"):
        writer.add_q_lora_rank(c["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rotary)
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if "index_topk" in c:
        writer.add_uint32(f"{arch}.attention.indexer.head_count", c["index_n_heads"])
        writer.add_uint32(f"{arch}.attention.indexer.key_length", c["index_head_dim"])
        writer.add_uint32(f"{arch}.attention.indexer.top_k", c["index_topk"])


def write_scaling(writer: gguf.GGUFWriter, arch: str, rope: dict[str, Any]) -> None:
    """Write the keys of scaled positions, as converters do for all architectures."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for name in ("beta_fast", "beta_slow", "attention_factor"):
        if name in rope:
            key = name.replace("attention", "attn")
            writer.add_float32(f"{arch}.rope.scaling.yarn_{key}", rope[name])


def random_tensors(name: str, **overrides: Any) -> tuple[dict[str, Any], dict[str, Array]]:
    c = make_config(name, **overrides)
    stored = make_family(name, **overrides).state_dict()
    return c, dict(converted(c, {*stored}, lambda key: stored[key].float().numpy()))


def split_head(tensors: dict[str, Array], layers: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the trunk's tensors, and the head's with those that head files repeat."""
    own = f"blk.{layers}."
    trunk = {name: value for name, value in tensors.items() if not name.startswith(own)}
    top = {name: value for name, value in tensors.items() if not name.startswith("blk.")}
    return trunk, top | {n: v for n, v in tensors.items() if n.startswith(own)}


def usual(main: Type) -> TypeOf:
    """Return the types of a file of type `main`: vectors, routers and convolutions in fp32."""

    def type_of(name: str, value: Array) -> Type:
        block, _ = gguf.GGML_QUANT_SIZES[main]
        plain = value.ndim < 2 or re.search("ffn_gate_inp|ssm_conv1d|ssm_ba", name)
        return Type.F32 if plain or value.shape[-1] % block else main

    return type_of


def raw_blocks(value: Array, kind: Type, seed: int) -> npt.NDArray[np.uint8]:
    """Quantises, or draws blocks of a type that the package can't quantise."""
    try:
        return gguf.quants.quantize(value, kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        draw, rows = np.random.default_rng(seed), int(np.prod(value.shape)) // block
        blocks = draw.integers(0, 256, (rows, size), dtype=np.uint8)
        scale = np.array([2e-4 if "K" in kind.name else 1e-3], np.float16).view(np.uint8)
        places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
        for place in places.get(kind.name, (0,)):
            blocks[:, place : place + 2] = scale
        return blocks.reshape(*value.shape[:-1], -1)


def write_gguf(
    path: Path,
    c: dict[str, Any],
    tensors: dict[str, Array],
    type_of: TypeOf,
    *,
    more: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write converted tensors; return the path."""
    path.parent.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(path, ARCHITECTURES[c["model_type"]])
    write_keys(writer, c)
    if more is not None:
        more(writer)
    for number, (name, value) in enumerate(tensors.items()):
        kind = type_of(name, value)
        if kind == Type.F32:
            writer.add_tensor(name, np.ascontiguousarray(value, np.float32))
        elif kind == Type.F16:
            writer.add_tensor(name, value.astype(np.float16))
        else:
            writer.add_tensor(name, raw_blocks(value, kind, number), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dequantised(path: Path) -> dict[str, Array]:
    """Return every tensor of a file as the package dequantises it."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name] = values.astype(np.float32).reshape(shape)
    return found


def write_wide(path: Path, kind: str) -> Path:
    """Write a random hybrid whose rows fill blocks of 256, in one type."""
    wide = {
        "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_value_heads": 8,
        "tie_word_embeddings": False, "num_hidden_layers": 2, "full_attention_interval": 2,
    }  # fmt: skip
    c, stored = make_config("qwen3.5", **wide), make_family("qwen3.5", **wide).state_dict()
    tensors = dict(converted(c, {*stored}, lambda key: stored[key].float().numpy()))
    return write_gguf(path, c, tensors, usual(Type[kind]))


def open_gguf(path: Path) -> Checkpoint:
    """Open and check a file; it must have everything that its configuration wants."""
    folder = find_model(str(path)).folder
    checkpoint = open_checkpoint(folder)
    checkpoint.check(checkpoint.settle(load_config(folder)))
    return checkpoint


def assert_equal_weights(path: Path, c: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Check that what the checkpoint reads, converted, is what the package reads, to the bit."""
    parts = ("weight_scale", "weight_minimum")
    names = {n for n in checkpoint.tensors if not n.endswith(parts)}
    found = dict(converted(c, names, lambda name: checkpoint.read(name).numpy()))
    wanted = dequantised(path)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
