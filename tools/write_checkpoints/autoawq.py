# ruff: noqa: E402, PT018
"""Write a small checkpoint with AutoAWQ 0.2.9.

    pip install -e .[dev] && pip install --no-deps autoawq==0.2.9   # in an environment of its own
    python tools/write_checkpoints/autoawq.py tests/data/checkpoints

Weights are random and rounded to the nearest; the package packs and unpacks them. Its last release
does not load beside new transformers, so its module of packing is loaded alone.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
sys.path[0] = str(ROOT)
for name in ("awq", "awq.modules", "awq.modules.linear"):
    hollow = ModuleType(name)
    found = find_spec(name)
    assert found is not None and found.submodule_search_locations is not None
    hollow.__path__ = [*found.submodule_search_locations]
    sys.modules[name] = hollow
sys.path.append(str(Path(__file__).parent))

from awq.modules.linear.gemm import WQLinear_GEMM
from awq.utils.packing_utils import dequantize_gemm
from source import GLM, grid, write_packed
from torch import Tensor, nn

GROUP = 32


def pack(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales, zeros = grid(weight, 4, GROUP, symmetric=False)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    packed = WQLinear_GEMM.from_linear(
        linear, 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
    )
    parts = packed.state_dict()
    words, scale = (parts["qweight"], parts["qzeros"]), parts["scales"].float()
    return parts, dequantize_gemm(*words, scale, 4, GROUP).T


if __name__ == "__main__":
    said = {"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    said |= {"quant_method": "awq", "modules_to_not_convert": None}
    write_packed(Path(sys.argv[1]) / "autoawq", "glm-4.6", GLM, said, pack)
