"""Random checkpoints of DeepSeek-V4 by transformers' class, with an MTP module beside the trunk."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from mtpbuild.builder.models import find_family_of, load_config
from mtpbuild.builder.weights.files import open_checkpoint

KINDS = ["sliding", "compressed_sparse", "heavily_compressed", "compressed_sparse", "sliding"]
SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 24, "moe_intermediate_size": 12, "num_attention_heads": 4,
    "head_dim": 16, "q_lora_rank": 12, "num_experts_per_tok": 2, "n_routed_experts": 6,
    "sliding_window": 8, "o_groups": 2, "o_lora_rank": 6, "index_n_heads": 16, "index_head_dim": 10,
    "index_topk": 3, "partial_rotary_factor": 0.5, "max_position_embeddings": 1024,
    "initializer_range": 0.35, "swiglu_limit": 0.7, "num_hidden_layers": len(KINDS),
    "layer_types": [f"{kind}_attention" for kind in KINDS],
    "mlp_layer_types": ["hash_moe", *["moe"] * (len(KINDS) - 1)], "pad_token_id": 0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}
# The names that DeepSeek gives, where transformers' files have others.
NATIVE = (
    (r"^model\.layers\.", "layers."), (r"^model\.norm\.", "norm."),
    (r"^model\.embed_tokens\.", "embed."), (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
)  # fmt: skip


def make_model(heavy: int, *, yarn: bool, seed: int = 0, **sizes: Any) -> DeepseekV4ForCausalLM:
    """Make a model whose last layer is to be the MTP module's; heavy: tokens of the larger rows."""
    torch.manual_seed(seed)
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": heavy}
    rope = {"rope_parameters": dict(YARN)} if yarn else {}
    model = DeepseekV4ForCausalLM(
        DeepseekV4Config(**SIZES | sizes, compress_rates=rates, **rope)
    ).eval()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if "norm" in name:
                value.copy_(1 + 0.3 * torch.randn(value.shape))
            elif name.endswith("tid2eid"):
                value.copy_(torch.stack([torch.randperm(6)[:2] for _ in value]))
            elif name.endswith(("sinks", "base", "position_bias", "scale", "correction_bias")):
                value.copy_(0.5 * torch.randn(value.shape))
            elif name.endswith("fn"):
                value.mul_(0.3)
    return model


def save(
    folder: Path,
    *,
    heavy: int = 16,
    yarn: bool = True,
    native: bool = False,
    stages: int = 0,
    markov: float = 1.0,
    **sizes: Any,
) -> Any:
    """Write trunk and module; return transformers' trunk.

    native: in DeepSeek's own spelling. stages: layers of a DSpark head in place of the module.
    markov: a factor of that head's biases by the token before.
    """
    last = len(KINDS) - 1
    for _ in range(stages - 1):
        sizes = add_layer(SIZES | sizes)
    whole = make_model(heavy, yarn=yarn, **sizes)
    whole.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    named = dict[str, Tensor]()
    for name, value in tensors.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        place = int(match[1]) - last if match else -1
        named[f"mtp.{place}.{match[2]}" if match and place >= 0 else name] = value
    E, V = whole.config.hidden_size, whole.config.vocab_size
    joints = make_dspark_joints(E, V, stages, markov) if stages else make_joints(E)
    save_file(named | joints, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw |= {key: raw[key][:last] for key in ("layer_types", "mlp_layer_types")}
    raw |= {"num_hidden_layers": last, "num_nextn_predict_layers": 1}
    raw |= DSPARK if stages else {}
    (folder / "config.json").write_text(json.dumps(raw))
    loaded = DeepseekV4ForCausalLM.from_pretrained(folder).eval()
    if native:
        spell_natively(folder, raw, heavy, yarn=yarn)
    return loaded


DSPARK: dict[str, Any] = {
    "dspark_block_size": 5, "dspark_noise_token_id": 59, "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": 7,
}  # fmt: skip


def add_layer(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of a model that has one more layer, without compressed rows."""
    kinds = {"layer_types": "sliding_attention", "mlp_layer_types": "moe"}
    more = {name: [*sizes[name], kind] for name, kind in kinds.items()}
    return sizes | more | {"num_hidden_layers": sizes["num_hidden_layers"] + 1}


def make_dspark_joints(E: int, V: int, stages: int, markov: float) -> dict[str, Tensor]:
    """Draw what a DSpark head has beside its layers, under DeepSeek's names; V: the vocabulary."""
    rank, N, last = DSPARK["dspark_markov_rank"], 4, f"mtp.{stages - 1}"
    taps = len(DSPARK["dspark_target_layer_ids"])
    return {
        "mtp.0.main_proj.weight": torch.randn(E, taps * E) / (taps * E) ** 0.5,
        "mtp.0.main_norm.weight": 1 + 0.3 * torch.randn(E),
        f"{last}.norm.weight": 1 + 0.3 * torch.randn(E),
        f"{last}.hc_head_fn": 0.1 * torch.randn(N, N * E),
        f"{last}.hc_head_base": torch.randn(N),
        f"{last}.hc_head_scale": torch.randn(1),
        f"{last}.markov_head.markov_w1.weight": markov * torch.randn(V, rank),
        f"{last}.markov_head.markov_w2.weight": torch.randn(V, rank),
        f"{last}.confidence_head.proj.weight": torch.randn(1, E + rank),
    }


# Sizes whose experts have whole blocks of FP4.
BLOCKS: dict[str, Any] = {
    "hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 32, "q_lora_rank": 32,
    "o_lora_rank": 32, "index_head_dim": 32, "initializer_range": 0.1,
}  # fmt: skip
MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # of FP4's codes


def store_experts_in_fp4(folder: Path) -> None:
    """Rewrite routed experts as DeepSeek publishes them: two codes in a byte, and powers of two."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".ffn.experts." in name]:
        blocks = tensors[name].unflatten(1, (-1, 32))
        powers = (blocks.abs().amax(-1) / 6).log2().ceil()
        numbers = blocks / 2 ** powers[..., None]
        codes = (numbers.abs()[..., None] - MAGNITUDES).abs().argmin(-1) + 8 * (numbers < 0)
        codes = codes.flatten(1).to(torch.uint8)
        tensors[name] = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
        scale = (powers + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
        tensors[name.replace(".weight", ".scale")] = scale
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    quantisation = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"}
    raw |= {"quantization_config": quantisation | {"weight_block_size": [128, 128]}}
    (folder / "config.json").write_text(json.dumps(raw | {"expert_dtype": "fp4"}))


def make_joints(E: int) -> dict[str, Tensor]:
    """Draw what the module has beside its layer, under DeepSeek's names; E: the hidden size."""
    N = 4
    joints = {
        f"mtp.0.{name}.weight": 1 + 0.3 * torch.randn(E) for name in ("enorm", "hnorm", "norm")
    }
    joints |= {f"mtp.0.{name}_proj.weight": 0.3 * torch.randn(E, E) for name in "eh"}
    heads = {"fn": 0.1 * torch.randn(N, N * E), "base": torch.randn(N), "scale": torch.randn(1)}
    return joints | {f"mtp.0.hc_head_{name}": value for name, value in heads.items()}


def spell_natively(folder: Path, raw: dict[str, Any], heavy: int, *, yarn: bool) -> None:
    """Rewrite configuration and names as DeepSeek's repositories have them."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {}
    for name, value in tensors.items():
        for pattern, theirs in NATIVE:
            name = re.sub(pattern, theirs, name)
        renamed[name] = value
    save_file(renamed, folder / "model.safetensors")
    for key in ("layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor"):
        del raw[key]
    raw |= {"compress_ratios": [0, 4, heavy, 4, 0], "num_hash_layers": 1, "qk_rope_head_dim": 8}
    raw |= {"rope_scaling": {"type": "yarn", **YARN} if yarn else None}
    del raw["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(raw))


def load_plain(folder: Path) -> Any:
    """Return the plain model of a checkpoint, whose tensors fit the family's table."""
    config, checkpoint = load_config(folder), open_checkpoint(folder)
    checkpoint.check(config)
    plain = find_family_of(config).reference(config)
    values = {name: checkpoint.read(name) for name in plain.state_dict()}
    plain.load_state_dict(values)
    return plain.eval()


def move_windows(plain: Any) -> None:
    """Let each token of a DSpark head's block see as many rows as are in a window, itself included.

    By the formula all see the same rows before the block, and the block.
    """
    for stage in plain._modules["mtp"]:  # `mtp` is a method, too
        stage.self_attn.attend = partial(attend_to_own_window, stage.self_attn)


def attend_to_own_window(
    attention: Any, latent: Tensor, place: Tensor, rows: Tensor, seen: Tensor
) -> Tensor:
    at = place[-1] + 1 - rows.shape[1] + torch.arange(rows.shape[1])
    seen = seen & (at > place[:, None] - attention.config.sliding_window)
    result: Tensor = type(attention).attend(attention, latent, place, rows, seen)
    return result


@torch.no_grad()
def draft_in_chain(plain: Any, tokens: list[int], nextn: int, *, pad: bool = False) -> list[Tensor]:
    """Return the logits [V] of each draft of the module after tokens, from scratch.

    pad: whether the first token has a row, too, beside a hidden state of zeros.
    """
    known = torch.tensor([tokens])
    following, hidden = known[:, 1:], plain.main(known[:, :-1])
    if pad:
        following, hidden = known, torch.cat([torch.zeros_like(hidden[:, :1]), hidden], 1)
    logits = list[Tensor]()
    for _ in range(nextn):
        y = plain.mtp(1, following, hidden)[:, -1:]
        logits.append(plain.draft_logits(1, y)[0, 0])
        following = torch.cat([following, logits[-1].argmax()[None, None]], 1)
        hidden = torch.cat([hidden, y], 1)
    return logits
