"""Runs oracle O1: transformers' DeepSeek-V3 on the same checkpoint, in fp32."""

import logging
from pathlib import Path
from typing import Any

import torch


def transformers_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)  # it lists the MTP layers as unused
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def transformers_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return out[0, len(prompt) :].tolist()


def load_modules(theirs: Any, ours: Any) -> None:
    """Put our modules' weights into an `MtpModel`, whose own loader knows few layer counts."""
    first = ours.config.num_hidden_layers
    for k, layer in enumerate(theirs.layers):
        module = ours.model.layers[first + k]
        experts = module.mlp.experts
        state = {n: p for n, p in module.state_dict().items() if ".experts." not in n}
        state["mlp.experts.gate_up_proj"] = torch.stack(
            [torch.cat([e.gate_proj.weight, e.up_proj.weight]) for e in experts]
        )
        state["mlp.experts.down_proj"] = torch.stack([e.down_proj.weight for e in experts])
        own = {"enorm.weight", "hnorm.weight", "eh_proj.weight"}
        named = {n if n in own else f"mtp_block.{n}": p for n, p in state.items()}
        named["post_norm.weight"] = named.pop("mtp_block.shared_head.norm.weight")
        layer.load_state_dict(named)
