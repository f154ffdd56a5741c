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
    {}, {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.1, "top_k": 5, "repetition_penalty": 1.2},
    {"temperature": 0.7, "min_p": 0.05, "draft_sample_method": "greedy"},
)  # fmt: skip


@dataclass(frozen=True)
class DrawnModel:
    """A family in drawn sizes, two engines of it, and how they are run."""

    family: str
    seed: int  # of the weights and of the requests
    scale: float  # of what layers add: small, drafts are often right; 1, seldom
    sizes: dict[str, Any]
    format: dict[str, Any]  # flags of both engines
    alone: dict[str, Any]  # flags of the engine that runs each request alone
    nextn: int
    beside: dict[str, Any]  # flags of the engine that drafts and runs several at once
    run: dict[str, Any]  # how the latter is loaded
    samples: bool  # whether some requests are sampled; otherwise only greedy programs are built

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
        lengths = [length + rng.randint(0, 1) for length in rng.sample(LENGTHS, len(LENGTHS))]
        prompts = [rng.choices(range(self.sizes["vocab_size"]), k=length) for length in lengths]
        params = list[SamplingParams]()
        for i in range(len(prompts)):
            count, how = rng.randint(1, LONGEST), SETTINGS[self.samples * (i % len(SETTINGS))]
            params.append(SamplingParams(count, ignore_eos=True, seed=self.seed + i, **how))
        return prompts, params


def draw_model(seed: int, number: int) -> DrawnModel:
    """Draw a run's model of this number; one number after the other has another family."""
    rng, family = random.Random(f"{seed}:{number}"), [*FAMILIES][number % len(FAMILIES)]
    weights = rng.choice([None, "int8", "int4"])
    caches = ["float32", "bfloat16", "int8"][: 1 if weights is None else 3 - (family in CHOOSERS)]
    format = {"weights": weights, "cache_dtype": rng.choice(caches)}
    format["head_weights"] = rng.choice([None, "int8", "int4", "none"]) if weights else None
    sizes = draw_sizes(family, rng, blocks=0.2 if weights is None else 0.6)
    if format["cache_dtype"] != "float32":
        sizes["hidden_size"] = 32 * rng.randint(1, 3)  # some weight has to be in integers
    nextn = rng.choice(DRAFTS)
    vanilla = nextn <= sizes.get("num_nextn_predict_layers", 1)
    drafter = rng.choice(["mtp-eagle", "mtp-vanilla"][: 1 + vanilla]) if nextn else None
    chunk, batch = rng.choice([2, 3, 5, 7, 16, 33, 64]), rng.randint(2, 5)
    return DrawnModel(
        family,
        seed=rng.randrange(10**6),
        scale=rng.choice([0.02, 0.1, 0.3, 1.0]),
        sizes=sizes,
        format=format,
        alone={"prefill_chunk": rng.choice([16, 64, 256])},
        nextn=nextn,
        beside={"drafter": drafter, "max_batch": batch, "prefill_chunk": chunk},
        run={"threads": rng.randint(1, 2), "prefix_cache": rng.random() < 0.5},
        samples=rng.random() < 0.4,
    )


def draw_sizes(family: str, rng: random.Random, blocks: float) -> dict[str, Any]:
    """Draw all sizes that a family's configuration has; `blocks` of them are whole blocks of 32."""
    base = FAMILIES[family]
    hybrid, experts = "linear_key_head_dim" in base, rng.choice(EXPERTS)
    layers = rng.randint(1, 2) + hybrid
    groups = rng.choice([1, *(n for n in range(1, experts // 2 + 1) if experts % n == 0)])
    most = experts // groups * (kept := rng.randint(1, groups))  # experts of the groups kept
    keys, values = rng.randint(1, 3), rng.randint(1, 3)
    heads, rotary = rng.randint(1, 5), 2 * rng.randint(1, 6)
    partial = (rotary + 0.5, rotary + rng.randint(1, 9))  # rotated values of a head's

    def width(least: int = 3) -> int:
        return 32 * rng.randint(1, 3) if rng.random() < blocks else rng.randint(least, 90)

    def names(one: str, other: str) -> list[str]:
        return [rng.choice([one, other]) for _ in range(layers)]

    attention = [*names(*KINDS)[2:], *KINDS][:layers]
    rng.shuffle(attention)
    latent, rope = "kv_lora_rank" in base, base.get("rope_parameters", {})
    whole = "partial_rotary_factor" not in base | rope
    drawn: dict[str, Any] = {
        "vocab_size": rng.randint(17, 300), "hidden_size": width(9), "intermediate_size": width(),
        "moe_intermediate_size": width(), "shared_expert_intermediate_size": width(),
        "num_hidden_layers": layers, "num_nextn_predict_layers": rng.randint(1, 3),
        "mtp_num_hidden_layers": 1, "first_k_dense_replace": rng.randrange(layers),
        "n_routed_experts": experts, "num_experts": experts, "n_shared_experts": rng.randint(0, 2),
        "n_group": groups, "topk_group": kept,
        "num_experts_per_tok": rng.choice([rng.randint(1, most), most]),
        "norm_topk_prob": rng.random() < 0.7, "routed_scaling_factor": rng.choice([1.0, 1.8, 2.5]),
        "num_attention_heads": heads if latent else keys * heads,
        "num_key_value_heads": heads if latent else keys,
        "q_lora_rank": width() if family in CHOOSERS else rng.choice([None, width()]),
        "kv_lora_rank": width(), "qk_nope_head_dim": rng.randint(1, 40), "v_head_dim": width(),
        "qk_rope_head_dim": rotary, "head_dim": rotary if whole else partial[1],
        "partial_rotary_factor": 1.0 if latent else partial[0] / partial[1],
        "attention_bias": rng.random() < 0.5, "use_qk_norm": rng.random() < 0.5,
        "tie_word_embeddings": rng.random() < 0.2, "mlp_layer_types": names("dense", "sparse"),
        "linear_conv_kernel_dim": rng.randint(2, 5), "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * values, "linear_key_head_dim": width(),
        "linear_value_head_dim": width(), "mlp_only_layers": [rng.randrange(layers)],
        "index_topk": rng.randint(1, 40), "index_n_heads": rng.randint(1, 13),
        "index_head_dim": rotary + rng.randint(0, 30),
        "indexer_types": ["full", *names("full", "shared")[1:]],
        "index_share_for_mtp_iteration": rng.random() < 0.5,
    }  # fmt: skip
    if hybrid:
        turned = {"partial_rotary_factor": drawn["partial_rotary_factor"]}
        drawn |= {"layer_types": attention, "rope_parameters": rope | turned}
    return {key: value for key, value in drawn.items() if key in base or key == "layer_types"}
