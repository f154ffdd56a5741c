"""Draws small models of every family in shapes that nobody publishes, engines and requests."""

import random
from dataclasses import dataclass
from typing import Any

import torch

from mtpbuild.builder.models.common.plain import PlainCausalLM
from mtpbuild.runtime import SamplingParams
from tests.support.families import CHOOSERS, FAMILIES, make_family

MAX_SEQ_LEN, LONGEST = 160, 36  # tokens of a request; of its answer
LENGTHS = (1, 2, 5, 16, 31, 64, 65, 120)  # of prompts, each give or take one
DRAFTS = (0, *2 * (1, 2, 3), *range(4, 16))
EXPERTS = (*range(2, 13), 18, 24)  # above 16 only chosen ones are computed
KINDS = ("full_attention", "linear_attention")  # of a hybrid's layers, which has both
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.1, "top_k": 5, "repetition_penalty": 1.2},
    {"temperature": 0.7, "min_p": 0.05, "draft_sample_method": "greedy"},
)


@dataclass(frozen=True)
class DrawnModel:
    """A family in drawn sizes, two engines of it, and how they are run."""

    family: str
    seed: int  # of the weights and of the requests
    scale: float  # of what layers add: small, drafts are often right; 1, seldom
    sizes: dict[str, Any]
    format: dict[str, Any]  # flags of both engines
    alone: dict[str, Any]  # flags of the engine that runs each request alone
    beside: dict[str, Any]  # flags of the engine that drafts and runs several at once
    run: dict[str, Any]  # how the latter is loaded
    samples: bool  # whether some requests are sampled; otherwise only greedy programs are built

    @property
    def nextn(self) -> int:
        return int(self.beside["nextn"])

    def make(self) -> PlainCausalLM:
        model = make_family(self.family, self.seed, **self.sizes)
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                weight.detach().mul_(self.scale)
            elif name.endswith("fc.weight"):  # joins the inputs of a hybrid's module
                weight.detach().lerp_(torch.eye(*weight.shape), 1 - self.scale)
        return model

    def requests(self) -> tuple[list[list[int]], list[SamplingParams]]:
        """Draw prompts, and parameters that are greedy or alternate."""
        rng = random.Random(self.seed)
        prompts = [
            rng.choices(range(self.sizes["vocab_size"]), k=length + rng.randint(0, 1))
            for length in rng.sample(LENGTHS, len(LENGTHS))
        ]
        params = [
            SamplingParams(
                max_tokens=rng.randint(1, LONGEST) if i else LONGEST,
                ignore_eos=True,
                seed=self.seed + i,
                **SETTINGS[i % len(SETTINGS)] if self.samples else {},
            )
            for i in range(len(prompts))
        ]
        return prompts, params


def draw_model(seed: int, number: int) -> DrawnModel:
    """Draw a run's model of this number; one number after the other has another family."""
    rng, family = random.Random(f"{seed}:{number}"), [*FAMILIES][number % len(FAMILIES)]
    weights = rng.choice([None, "int8", "int4"])
    caches = ["float32", "bfloat16", "int8"][: 1 if weights is None else 3 - (family in CHOOSERS)]
    format = {"weights": weights, "cache_dtype": rng.choice(caches)}
    if weights is not None:
        format["head_weights"] = rng.choice([None, "int8", "int4", "none"])
    sizes = draw_sizes(family, rng, blocks=0.2 if weights is None else 0.6)
    if format["cache_dtype"] != "float32":
        sizes["hidden_size"] = 32 * rng.randint(1, 3)  # some weight has to be in integers
    modules = sizes.get("num_nextn_predict_layers", 1)
    nextn = rng.choice(DRAFTS)
    drafters = ["mtp-eagle", "mtp-vanilla"][: 2 if nextn <= modules else 1]
    chunk = rng.choice([2, 3, 5, 7, 16, 33, 64])
    return DrawnModel(
        family,
        rng.randrange(10**6),
        rng.choice([0.02, 0.1, 0.3, 1.0]),
        sizes,
        format,
        {"nextn": 0, "prefill_chunk": rng.choice([16, 64, 256])},
        {"nextn": nextn, "drafter": rng.choice(drafters) if nextn else None}
        | {"max_batch": rng.randint(2, 5), "prefill_chunk": chunk},
        {"threads": rng.randint(1, 2), "prefix_cache": rng.random() < 0.5},
        rng.random() < 0.4,
    )


def draw_sizes(family: str, rng: random.Random, blocks: float) -> dict[str, Any]:
    """Draw all sizes that a family's configuration has; `blocks` of them are whole blocks of 32."""
    base = FAMILIES[family]
    hybrid, experts = "linear_key_head_dim" in base, rng.choice(EXPERTS)
    layers = rng.randint(2, 3) if hybrid else rng.randint(1, 2)
    groups = rng.choice([n for n in range(1, experts // 2 + 1) if experts % n == 0])
    kept, keys, values = rng.randint(1, groups), rng.randint(1, 3), rng.randint(1, 3)
    heads, rotary = rng.randint(1, 5), 2 * rng.randint(1, 6)
    partial = (rotary + 0.5, rotary + rng.randint(1, 9))  # rotated values of a head's

    def width(least: int = 3) -> int:
        return 32 * rng.randint(1, 3) if rng.random() < blocks else rng.randint(least, 90)

    def names(one: str, other: str) -> list[str]:
        return [rng.choice([one, other]) for _ in range(layers)]

    attention = [*names(*KINDS)[2:], *KINDS][:layers]
    rng.shuffle(attention)
    latent = "kv_lora_rank" in base
    whole = "partial_rotary_factor" not in base and "rope_parameters" not in base
    drawn = {
        "vocab_size": rng.randint(17, 300), "hidden_size": width(9), "intermediate_size": width(),
        "moe_intermediate_size": width(), "shared_expert_intermediate_size": width(),
        "num_hidden_layers": layers, "num_nextn_predict_layers": rng.randint(1, 3),
        "mtp_num_hidden_layers": 1, "first_k_dense_replace": rng.randrange(layers),
        "n_routed_experts": experts, "num_experts": experts, "n_shared_experts": rng.randint(0, 2),
        "n_group": 1 if rng.random() < 0.5 else groups, "topk_group": kept,
        "norm_topk_prob": rng.random() < 0.7, "routed_scaling_factor": rng.choice([1.0, 1.8, 2.5]),
        "num_attention_heads": heads if latent else keys * heads,
        "num_key_value_heads": heads if latent else keys,
        "q_lora_rank": width() if family in CHOOSERS else rng.choice([None, width()]),
        "kv_lora_rank": width(), "qk_nope_head_dim": rng.randint(1, 40), "v_head_dim": width(),
        "qk_rope_head_dim": rotary, "head_dim": rotary if whole else partial[1],
        "partial_rotary_factor": 1.0 if latent else partial[0] / partial[1],
        "attention_bias": rng.random() < 0.5, "use_qk_norm": rng.random() < 0.5,
        "tie_word_embeddings": rng.random() < 0.2,
        "linear_conv_kernel_dim": rng.randint(2, 5), "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * values, "linear_key_head_dim": width(),
        "linear_value_head_dim": width(),
        "mlp_layer_types": names("dense", "sparse"), "mlp_only_layers": [rng.randrange(layers)],
        "index_topk": rng.randint(1, 40), "index_n_heads": rng.randint(1, 13),
        "index_head_dim": rotary + rng.randint(0, 30),
        "indexer_types": ["full", *names("full", "shared")[1:]],
        "index_share_for_mtp_iteration": rng.random() < 0.5,
    }  # fmt: skip
    if drawn["n_group"] == 1:
        drawn["topk_group"] = 1
    chosen_from = experts // drawn["n_group"] * drawn["topk_group"]
    drawn["num_experts_per_tok"] = rng.choice([rng.randint(1, chosen_from), chosen_from])
    drawn = {key: value for key, value in drawn.items() if key in base}
    if hybrid:
        drawn["layer_types"] = attention
    if "partial_rotary_factor" in (rope := base.get("rope_parameters", {})):
        drawn["rope_parameters"] = rope | {"partial_rotary_factor": partial[0] / partial[1]}
    return drawn
