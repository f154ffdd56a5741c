"""Oracle O1: transformers' DeepSeek-V3 on the same checkpoint, in fp32."""

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
