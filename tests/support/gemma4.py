"""Random checkpoints of Gemma-4 and its assistant, by transformers' classes; their oracle."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)
from transformers.generation import candidate_generator

from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.models import load_config
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.weight import Readable, convert_weights, join_slices
from mtpbuild.builder.plan.recipe import FoundModel
from mtpbuild.builder.program.opened_model import open_model
from mtpbuild.builder.weights.balance import BalancedReader
from mtpbuild.builder.weights.head import read_head_config
from tests.support.opened import NO_IDS

SIZES: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "global_head_dim": 16, "sliding_window": 5,
    "max_position_embeddings": 512, "hidden_size_per_layer_input": 0, "num_hidden_layers": 5,
    "layer_types": [
        "sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
        "full_attention",
    ],
    "vocab_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    "final_logit_softcapping": 30.0, "bos_token_id": 2, "eos_token_id": [1], "pad_token_id": 0,
    "initializer_range": 0.35,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "mixture": {
        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24,
    },
    "small": {
        "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 60,
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "attention_k_eq_v": False,
    },
}  # fmt: skip
HEAD: dict[str, Any] = {
    "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 3, "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
Generator = candidate_generator.SinglePositionMultiTokenCandidateGenerator
Trunk, Head = Gemma4ForCausalLM, Gemma4AssistantForCausalLM


def make_trunk(shape: str, seed: int = 0, **changes: Any) -> Gemma4ForCausalLM:
    torch.manual_seed(seed)
    config = Gemma4TextConfig(**SIZES | SHAPES[shape] | changes)
    return spread(Gemma4ForCausalLM(config))


def make_assistant(
    shape: str,
    seed: int = 1,
    backbone: int = SIZES["hidden_size"],
    *,
    ordered: bool = True,
    **changes: Any,
) -> Gemma4AssistantForCausalLM:
    """Make a head for a trunk of this shape, whose hidden size is `backbone`.

    ordered: whether that of a small trunk has groups of tokens.
    """
    torch.manual_seed(seed)
    sizes = SIZES | {"attention_k_eq_v": SHAPES[shape].get("attention_k_eq_v", True)} | HEAD
    text = Gemma4TextConfig(**sizes | changes)
    config = Gemma4AssistantConfig(
        text_config=text.to_dict(),
        backbone_hidden_size=backbone,
        use_ordered_embeddings=ordered and shape == "small",
        num_centroids=12,
        centroid_intermediate_top_k=4,
    )
    head = spread(Gemma4AssistantForCausalLM(config))
    if head.masked_embedding is not None:
        head.masked_embedding.token_ordering.copy_(torch.randperm(text.vocab_size))
    return head


def make_multimodal(unified: bool) -> Any:
    """Make a trunk beside towers for images and sound."""
    torch.manual_seed(0)
    kind = "Gemma4Unified" if unified else "Gemma4"
    names = {**SIZES} if not unified else {k: v for k, v in SIZES.items() if "per_layer" not in k}
    text = getattr(transformers, f"{kind}TextConfig")(**names).to_dict()
    vision = {
        "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "head_dim": 8,
        "num_attention_heads": 2, "num_key_value_heads": 2, "patch_size": 4,
        "position_embedding_size": 32,
    }  # fmt: skip
    audio = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if unified:
        vision = {"mm_embed_dim": 16, "output_proj_dims": 12, "mm_posemb_size": 8}
        audio = {"audio_embed_dim": 16}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, audio_config=audio
    )
    return spread(getattr(transformers, f"{kind}ForConditionalGeneration")(config))


@torch.no_grad()
def spread(model: Any) -> Any:
    """Draw norms, scales and factors that differ from 1; branches outweigh the embedding."""
    for name, value in model.state_dict().items():
        if "norm" in name:
            value.copy_(
                (3 if "layernorm" in name and "post" in name else 1)
                + 0.3 * torch.randn(value.shape)
            )
        elif name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            value.copy_(0.6 + 0.6 * torch.rand(value.shape))
    return model.eval()


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def continue_greedily(trunk: Gemma4ForCausalLM, prompt: list[int], count: int) -> list[int]:
    trunk.generation_config.eos_token_id = None
    trunk.generation_config.max_length = None
    tokens = trunk.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    new: list[int] = tokens[0, len(prompt) :].tolist()
    return new


@torch.no_grad()
def draft(
    trunk: Gemma4ForCausalLM, head: Gemma4AssistantForCausalLM, tokens: list[int], count: int
) -> list[Tensor]:
    """Return transformers' logits [V] of the drafts after tokens; the newest has no row yet."""
    known = torch.tensor([tokens])
    outputs = trunk(
        known[:, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=False
    )
    head.generation_config.num_assistant_tokens = count
    settings = trunk.generation_config
    settings.max_length = len(tokens) + count + 2
    generator = Generator(head, trunk.get_input_embeddings(), settings)
    _, logits = generator.get_candidates(
        known, {}, outputs, is_first_iteration=False, n_last_matches=0
    )
    return [*logits[0]]


def open_saved(
    trunk: Gemma4ForCausalLM,
    head: Gemma4AssistantForCausalLM,
    place: Path,
    *,
    balanced: bool = False,
) -> CausalLM:
    """Save a trunk and its head; return the program's model of both."""
    folder, assistant = save(trunk, place / "trunk"), save(head, place / "head")
    config = read_head_config(assistant, folder, load_config(folder))
    opened = open_model(FoundModel("x", "x", folder, assistant), config, NO_IDS, GraphStyle())
    reader: Readable = opened.checkpoint
    if balanced:
        reader = BalancedReader(opened.checkpoint, opened.stored, config)
    values = dict(join_slices(convert_weights(reader, opened.table)))
    opened.model.load_state_dict(values, assign=True, strict=True)
    return opened.model.eval()


def place_one_off(model: Any) -> None:
    place = model.place_head
    model.place_head = lambda rows, lengths, *others: place(rows, lengths - 1, *others)


def read_unnormed(model: Any) -> None:
    run = model.run
    model.forward = lambda tokens, state, rows: run(tokens, state, rows, len(model.layers))
    model.logits = lambda hidden, gather=None: type(model).logits(model, model.norm(hidden))
