"""gated_product: silu(x gate) * (x up), for a plain weight that holds gate and up."""

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_TOKENS = 64


@torch.library.custom_op("mtpbuild::gated_product", mutates_args=())
def gated_product(x: Tensor, gate_up: Tensor) -> Tensor:
    """Multiply x [.., E] by a gate and an up [E, 2 I], gate first: silu(x gate) * (x up), [.., I].

    The kernel takes up to `MAX_TOKENS` tokens and joins the products in fp32.
    """
    gate, up = (x @ gate_up).chunk(2, dim=-1)
    return F.silu(gate) * up


gated_product.register_fake(lambda x, gate_up: x.new_empty(*x.shape[:-1], gate_up.shape[-1] // 2))
