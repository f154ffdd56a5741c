"""Optimises matrices with Muon and the rest with AdamW, with one learning-rate factor for both."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def orthogonal(stack: Tensor, steps: int = 5) -> Tensor:
    """Approximate, by Newton-Schulz, the nearest semi-orthogonal matrices to [N, rows, cols]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = stack.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.mT if tall else x
    return x.to(stack.dtype)


class Optimizer:
    """An optimiser that uses Muon for parameters with `blocks`, which are stacks of matrices."""

    def __init__(self, parameters: Iterable[nn.Parameter], muon_lr: float, adam_lr: float) -> None:
        trained = [p for p in parameters if p.requires_grad]
        self.matrices = [p for p in trained if hasattr(p, "blocks")]
        rest = [p for p in trained if not hasattr(p, "blocks")]
        self.momentum = [torch.zeros_like(p) for p in self.matrices]
        self.muon_lr, self.adam_lr, self.decay, self.beta = muon_lr, adam_lr, 0.02, 0.95
        self.adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Take a step with `factor` times the learning rates, and clear the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for p, momentum in zip(self.matrices, self.momentum, strict=True):
            if p.grad is None:
                continue
            momentum.lerp_(p.grad, 1 - self.beta)
            update = p.grad.lerp_(momentum, self.beta)
            p.mul_(1 - self.muon_lr * factor * self.decay)
            parts = zip(torch.split(p, p.blocks), torch.split(update, p.blocks), strict=True)
            for weight, change in parts:
                by_shape[weight.shape].append((weight, change))
        for shape, pairs in by_shape.items():
            directions = orthogonal(torch.stack([change for _, change in pairs]))
            scale = self.muon_lr * factor * max(1.0, shape[0] / shape[1]) ** 0.5
            torch._foreach_add_([w for w, _ in pairs], list(directions.unbind()), alpha=-scale)
        for p in self.matrices:
            p.grad = None

    def state(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "momentum": self.momentum}

    def load(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        for mine, stored in zip(self.momentum, state["momentum"], strict=True):
            mine.copy_(stored)
