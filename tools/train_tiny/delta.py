"""The gated delta rule: in plain PyTorch, and compiled with its gradients for training on a CPU."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.cpp_extension import load

FLAGS = ["-O3", "-march=native", "-ffast-math"]


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the rule token by token; return outputs [B, T, H, Dv] and the state [B, H, Dk, Dv].

    q and k are [B, T, H, Dk], v [B, T, H, Dv], decay and beta [B, T, H].
    """
    outputs = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, None]
        seen = (state * k[:, t, :, :, None]).sum(2)
        change = beta[:, t, :, None] * (v[:, t] - seen)
        state = state + k[:, t, :, :, None] * change[:, :, None]
        outputs.append((state * q[:, t, :, :, None]).sum(2))
    return torch.stack(outputs, 1), state


@functools.cache
def kernels(key: int, value: int) -> Any:
    """Compile delta.cpp for heads of these sizes, once per machine."""
    source = Path(__file__).with_name("delta.cpp")
    flags = [*FLAGS, f"-DKEY={key}", f"-DVALUE={value}"]
    return load(f"delta_{key}_{value}", [str(source)], extra_cflags=flags)


@torch.library.custom_op("train_tiny::delta_rule", mutates_args=())
def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Apply the rule to fp32 sequences on a CPU, from a state of zeros."""
    given = [x.contiguous() for x in (q, k, v, decay, beta)]
    return kernels(q.shape[-1], v.shape[-1]).forward(*given)


@torch.library.custom_op("train_tiny::delta_rule_backward", mutates_args=())
def delta_rule_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = [x.contiguous() for x in (grad, q, k, v, decay, beta)]
    return tuple(kernels(q.shape[-1], v.shape[-1]).backward(*given))


@delta_rule.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@delta_rule_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, ...]:
    made = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, decay, beta)
    )
    return tuple(made)


def keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    return delta_rule_backward(grad, *ctx.saved_tensors)


delta_rule.register_autograd(gradients, setup_context=keep)


def delta_outputs(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Apply the rule to sequences, from a state of zeros."""
    if q.device.type == "cpu":
        return delta_rule(q, k, v, decay, beta)
    state = q.new_zeros(len(q), q.shape[2], q.shape[3], v.shape[3])
    return recurrent(q, k, v, decay, beta, state)[0]
