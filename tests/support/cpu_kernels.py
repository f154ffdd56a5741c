"""What tests of the CPU's kernels share: the library, random weights, and attention by token."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mtpbuild.runtime.cpu_library import find_library
from tests.support import exact

SANITIZED = os.environ.get("SANITIZED_CPU_LIBRARY")  # `test_sanitizers` sets it
LIBRARY = Path(SANITIZED) if SANITIZED else find_library()


def random_weight(
    rng: np.random.Generator, shape: tuple[int, ...], bits: int
) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.int32]]:
    """Values and scales of a weight [.., N, K] as checkpoints store them, and its integers."""
    *outer, K = shape
    integers = rng.integers(0, 1 << bits, (*outer, K // 32, 32))
    stored: NDArray[Any] = integers.astype(np.uint8)
    if bits == 4:
        stored = stored[..., 0::2] | stored[..., 1::2] << 4
    scales = (0.01 * rng.standard_normal((*outer, K // 32))).astype(np.float16)
    zero = 1 << bits - 1
    return torch.from_numpy(stored), torch.from_numpy(scales), (integers - zero).astype(np.int32)


def attended(given: Mapping[str, NDArray[Any]], scale: float, latent: int) -> NDArray[np.float32]:
    """What each token says, by itself, of the rows that it sees."""
    B, H, T, _ = given["q"].shape
    y = np.empty((B, H, T, latent), np.float32)
    for b in range(B):
        base, first = int(given["base"][b]), int(given["first"][b])
        for t in range(T):
            fresh = given["fresh"][b, 0, : first + t + 1]
            rows = np.concatenate([given["cache"][b, 0, :base], fresh])
            y[b, :, t] = exact.attention(given["q"][b, :, t], rows, scale, latent)
    return y
