# ruff: noqa: E402
"""Write small checkpoints with auto-round 0.16.1.

    pip install -e .[dev] auto-round==0.16.1   # in an environment of its own
    python tools/write_checkpoints/auto_round.py tests/data/checkpoints

Weights are random and rounded to the nearest; the package packs and unpacks them.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[0] = str(ROOT)  # the folder of this file would hide the package of its name

import torch
from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
from auto_round_extension.torch import qlinear_torch_zp
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent))
from source import DEEPSEEK, GLM, Pack, grid, write_packed

GROUP = 32


def as_linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def pack_gptq(module: Any, bits_of: Callable[[str], int], symmetric: bool) -> Pack:
    def pack(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = weight.shape
        bits = bits_of(name)
        scales, zeros = grid(weight, bits, GROUP, symmetric)
        packed = module.QuantLinear(bits, GROUP, columns, rows, False)
        packed.pack(
            as_linear(weight), scales, int(zeros[0, 0]) if symmetric else zeros, None, "cpu"
        )
        parts = packed.state_dict()
        packed.scales = packed.scales.float()
        # Inputs of one, each in a batch row of its own, give the weight.
        return parts, packed(torch.eye(columns)).T

    return pack


def pack_awq(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales, zeros = grid(weight, 4, GROUP, symmetric=False)
    packed = WQLinear_GEMM.from_linear(
        as_linear(weight), 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
    )
    parts = packed.state_dict()
    words, scale = (parts["qweight"], parts["qzeros"]), parts["scales"].float()
    return parts, dequantize_gemm(*words, scale, 4, GROUP).T


def settings(packing: str, symmetric: bool, **others: Any) -> dict[str, Any]:
    said = {"bits": 4, "group_size": GROUP, "sym": symmetric, "data_type": "int", "iters": 0}
    said |= {"autoround_version": "0.16.1", "block_name_to_quantize": "model.layers"}
    return said | {"quant_method": "auto-round", "packing_format": packing, **others}


def main(out: Path) -> None:
    four = pack_gptq(qlinear_torch_zp, lambda name: 4, symmetric=True)
    said = settings("auto_round:auto_gptq", True)
    write_packed(out / "auto_round_gptq", "kimi", DEEPSEEK, said, four)
    said = settings("auto_round:auto_awq", False)
    write_packed(out / "auto_round_awq", "glm-4.6", GLM, said, pack_awq)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
