"""The architectures that are trained here: shape, model, and how the model is trained."""

from dataclasses import dataclass
from typing import Any

from model import Model, Shape, TrainedModel
from qwen import QwenModel, QwenShape


@dataclass(frozen=True)
class Phase:
    """A phase up to share `end` of the budget; code and chat are (rows, length) of each step."""

    end: float
    code: tuple[int, int]
    chat: tuple[int, int]
    mtp: bool
    long_every: int = 0  # steps from one code row of 2,048 tokens to the next; 0: there is none
    code_every: int = 1  # steps from one batch of code to the next


@dataclass(frozen=True)
class Family:
    shape: Any
    smoke: Any  # a shape for --smoke
    make: Any  # the model of a shape
    phases: tuple[Phase, ...]
    distilled: Phase  # the steps of distill.py


FAMILIES = {
    "deepseek-tiny": Family(
        Shape(),
        Shape(
            hidden_size=64, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
            first_k_dense_replace=1, num_attention_heads=2, q_lora_rank=32, kv_lora_rank=16,
        ),
        Model,
        (
            Phase(0.45, (8, 256), (8, 256), mtp=False),
            Phase(0.75, (8, 256), (8, 256), mtp=True),
            Phase(0.92, (4, 512), (8, 256), mtp=True, long_every=8),
            Phase(1.00, (2, 512), (14, 256), mtp=True),
        ),
        Phase(1.00, (4, 512), (8, 256), mtp=True),
    ),
    "qwen-tiny": Family(
        QwenShape(),
        QwenShape(
            hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=1, linear_num_key_heads=1, linear_num_value_heads=2,
        ),
        QwenModel,
        (
            Phase(0.50, (16, 256), (16, 256), mtp=False, code_every=5),
            Phase(1.00, (16, 256), (16, 256), mtp=True, code_every=5, long_every=16),
        ),
        Phase(1.00, (16, 256), (16, 256), mtp=True, code_every=4),
    ),
}  # fmt: skip


def find_trained_model(values: dict[str, Any]) -> TrainedModel:
    """Return the model whose shape has these values, as a checkpoint stores them."""
    for family in FAMILIES.values():
        if values.keys() == vars(family.shape).keys():
            made: TrainedModel = family.make(type(family.shape)(**values))
            return made
    raise ValueError(f"no family of tools/train_tiny has the shape {sorted(values)}")
