"""Rounds numbers as quantised operators do."""

from pathlib import Path

from torch import Tensor, nn

from mtpbuild.builder.models.common.plain import PlainLM
from mtpbuild.builder.verify.plain import load_plain
from mtpbuild.builder.weights.stored import open_checkpoint


def in_int8_blocks(x: Tensor) -> Tensor:
    """Rounds x as our kernels round inputs: to int8, with a scale for each block of 32."""
    blocks = x.unflatten(-1, (-1, 32))
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return ((blocks / scales).round() * scales).flatten(-2)


def plain_with_rounding(folder: Path) -> PlainLM:
    """Makes the dequantised model, which rounds the inputs of quantised products."""
    model, checkpoint = load_plain(folder), open_checkpoint(folder)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and checkpoint.format(f"{name}.weight") is not None:
            module.register_forward_pre_hook(lambda _, given: (in_int8_blocks(given[0]),))
    return model
