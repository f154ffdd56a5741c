"""The slices to measure: some layers of DeepSeek-V4, a rank's share of R1's, small substitutes."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from mtpbuild.builder.checkpoint.config import ModelConfig, RopeConfig
from mtpbuild.builder.models import find_family_of, load_config
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config
from mtpbuild.builder.models.deepseek_v4.config import DeepseekV4Config
from mtpbuild.builder.models.ranks import check_ranks
from mtpbuild.builder.plan.recipe import find_recipe_folder
from mtpbuild.builder.weights.scheme import UNQUANTISED
from mtpbuild.runtime.contract.manifest import FloatType
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Slice:
    """Rank 0's part of `config`; dense, moe: numbers of main layers in the whole model, for R1.

    weights: the checkpoint's format, in which products stay, as in an engine.
    """

    config: ModelConfig
    dense: int
    moe: int
    context: int  # cached tokens
    nextn: tuple[int, ...]
    dtype: FloatType
    ranks: Ranks = ALONE
    weights: str = UNQUANTISED


def r1_share(
    tp: int, nextn: tuple[int, ...], weights: str = UNQUANTISED, recipe: str = "deepseek_v3"
) -> Slice:
    """Return one of `tp` ranks' share of a dense layer, three MoE layers, MTP module and both ends.

    The ends are embedding and head. The model is the one that a build makes for a rank. Raises
    UsageError, which lists the possible values of `tp`.
    """
    whole = load_config(find_recipe_folder() / recipe)
    assert isinstance(whole, DeepseekV3Config)
    check_ranks(whole, Ranks(tp))
    moe = sum(whole.moe_layers[: whole.num_hidden_layers])
    dense = whole.num_hidden_layers - moe
    config = whole.sliced(dense - 1, 4)
    return Slice(config, dense, moe, 4096, nextn, "bfloat16", Ranks(tp), weights)


def small(nextn: tuple[int, ...]) -> Slice:
    """Return a slice for a machine without a GPU: the same kinds of layers, one of two ranks."""
    config = DeepseekV3Config(
        vocab_size=160,
        hidden_size=48,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=24,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        moe_layers=(False, True, True),
        num_nextn_predict_layers=1,
        rms_norm_eps=1e-6,
        max_position_embeddings=1024,
        rope_interleave=True,
        tie_word_embeddings=False,
        rope=RopeConfig(),
    )
    return Slice(config, 3, 58, 40, nextn, "float32", Ranks(2))


def v4_slice(nextn: tuple[int, ...], context: int = 65536) -> Slice:
    """Return Flash's layers 2 to 4, which choose rows, see all rows and choose, with its module."""
    whole = load_config(find_recipe_folder() / "deepseek_v4_flash_preview")
    return Slice(whole.sliced(2, 3), 0, whole.num_hidden_layers, context, nextn, "bfloat16")


def small_v4(nextn: tuple[int, ...]) -> Slice:
    """Return a slice of the same kinds of layers for a machine without a GPU."""
    case = v4_slice(nextn, 160)
    assert isinstance(case.config, DeepseekV4Config)
    sizes: dict[str, Any] = {
        "vocab_size": 160, "hidden_size": 48, "moe_intermediate_size": 32, "n_routed_experts": 12,
        "num_experts_per_tok": 3, "num_attention_heads": 4, "head_dim": 32, "qk_rope_head_dim": 8,
        "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 8, "sliding_window": 16,
        "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8,
    }  # fmt: skip
    return replace(case, config=replace(case.config, **sizes), dtype="float32")


def check_memory(case: Slice, free: int | None = None) -> None:
    """Raise UsageError if the slice does not fit into the GPU's free bytes."""
    free = torch.cuda.mem_get_info()[0] if free is None else free
    with torch.device("meta"):
        model = find_family_of(case.config).make_model(case.config, case.ranks)
        values = sum(weight.numel() for weight in model.parameters())
    needed = 2 * values + (4 << 30)
    if needed > free:
        raise UsageError(
            f"the slice needs {needed / 1e9:.0f} GB of GPU memory, {free / 1e9:.0f} GB are free: "
            "give a larger --tp"
        )
