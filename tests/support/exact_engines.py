"""Engines with our kernels, and what they say."""

from pathlib import Path
from typing import Any

import numpy as np

from mtpbuild.runtime import Engine, SamplingParams
from tests.support.checkpoints import QUANTIZABLE, make_predictable, save_checkpoint
from tests.support.deepseek_v4 import BLOCKS
from tests.support.deepseek_v4 import save as save_deepseek_v4
from tests.support.families import make_family, save_family
from tests.support.gemma4 import make_assistant, make_trunk
from tests.support.gemma4 import save as save_gemma4

HEAD = "head"  # a folder beside a checkpoint whose head is another one's
DEEPSEEK = {"few": QUANTIZABLE, "many": QUANTIZABLE | {"n_routed_experts": 24}}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
FAMILIES = {
    "glm-4.6": SIZES | {"moe_intermediate_size": 32},
    "mimo": SIZES,
    "qwen3.5": SIZES | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    # a softmax router that chooses all of five experts: their weights are a sum of odd length
    "qwen3-next": SIZES
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "moe_intermediate_size": 32}
    | {"shared_expert_intermediate_size": 32, "num_experts": 5, "num_experts_per_tok": 5},
    "glm-5": {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    | {"q_lora_rank": 32, "kv_lora_rank": 32, "num_attention_heads": 4, "v_head_dim": 16},
}
GEMMA4 = {
    "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "global_head_dim": 32,
    "sliding_window": 9, "vocab_size": 72,
}  # fmt: skip
GEMMA4_SHAPES = {
    "dense": GEMMA4,
    "mixture": GEMMA4 | {"moe_intermediate_size": 32},
    "small": GEMMA4 | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 72},
}
LENGTHS = (1, 2, 7, 30, 5, 64, 3, 12)
Said = list[tuple[list[int], list[float]]]


def save(folder: Path, name: str) -> Path:
    if name in DEEPSEEK:
        return save_checkpoint(folder, make_predictable(**DEEPSEEK[name]), **DEEPSEEK[name])
    if name in ("deepseek-v4", "deepseek-v4-dspark"):
        stages = 2 if name.endswith("dspark") else 0
        save_deepseek_v4(folder, native=True, stages=stages, **BLOCKS | {"vocab_size": 72})
        return folder
    if (shape := name.removeprefix("gemma4-")) in GEMMA4_SHAPES:
        sizes = GEMMA4_SHAPES[shape]
        heads: dict[str, Any] = GEMMA4 | {"hidden_size": 32}
        head = make_assistant(shape, backbone=64, **heads)
        save_gemma4(head, folder.with_name(HEAD))
        return save_gemma4(make_trunk(shape, **sizes), folder)
    sizes = FAMILIES[name]
    return save_family(folder, name, make_family(name, **sizes), **sizes)


def requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 61, LENGTHS[i % len(LENGTHS)]).tolist() for i in range(count)]
    params = [
        SamplingParams(
            max_tokens=30 + i, ignore_eos=True, temperature=0.9 * (i % 2), seed=i, logprobs=1
        )
        for i in range(count)
    ]
    return prompts, params


def said(engine: Path, count: int, at_once: bool, threads: int = 1) -> Said:
    """Return tokens and log-probabilities of each request."""
    prompts, params = requests(count)
    with Engine.load(engine, threads=threads, prefix_cache=False) as loaded:
        if at_once:
            results = loaded.generate(prompts, params)
        else:
            results = [loaded.generate(*each) for each in zip(prompts, params, strict=True)]
    return [
        (list(result.token_ids), [token.logprob for token in result.logprobs or ()])
        for result in results
    ]


def same(one: Said, other: Said) -> bool:
    return all(a == b for a, b in zip(one, other, strict=True))
