"""Optimises matrices with Muon and the rest with AdamW, with one learning-rate factor for both."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

# Ends and routers, and weights that mix streams or windows.
BY_ADAM = ("embed_tokens.weight", "lm_head.weight", "gate.weight", "fn", "position_bias")


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
    """An optimiser that uses Muon for products, and AdamW for norms, routers, ends and the rest."""

    def __init__(self, model: nn.Module, muon_lr: float, adam_lr: float) -> None:
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        matrices = {n for n, p in trained.items() if p.ndim == 2 and not n.endswith(BY_ADAM)}
        self.matrices = [trained[name] for name in trained if name in matrices]
        self.momentum = [torch.zeros_like(p) for p in self.matrices]
        self.muon_lr, self.adam_lr, self.decay, self.beta = muon_lr, adam_lr, 0.02, 0.95
        rest = [weight for name, weight in trained.items() if name not in matrices]
        self.adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Take a step with `factor` times the learning rates, and clear the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for weight, momentum in zip(self.matrices, self.momentum, strict=True):
            if weight.grad is None:
                continue
            momentum.lerp_(weight.grad, 1 - self.beta)
            weight.mul_(1 - self.muon_lr * factor * self.decay)
            by_shape[weight.shape].append((weight, weight.grad.lerp_(momentum, self.beta)))
            weight.grad = None
        for shape, pairs in by_shape.items():
            directions = orthogonal(torch.stack([change for _, change in pairs]))
            scale = self.muon_lr * factor * max(1.0, shape[0] / shape[1]) ** 0.5
            torch._foreach_add_([w for w, _ in pairs], list(directions.unbind()), alpha=-scale)

    def state(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "momentum": self.momentum}

    def load(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        for momentum, stored in zip(self.momentum, state["momentum"], strict=True):
            momentum.copy_(stored)
