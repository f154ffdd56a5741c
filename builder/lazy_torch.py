"""A stand-in for `torch`, imported at its first use, as `mtpbuild plan` runs without torch.

Its `Tensor` is for annotations alone: at run time it is no type of torch's.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:

    class Tensor:
        pass

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("torch"), name)

    torch = _Torch()
