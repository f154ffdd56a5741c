"""The context that a build gives an engine whose user names none."""

from collections.abc import Callable
from pathlib import Path

from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.plan.weight_classes import (
    count_engine_classes,
    count_file_bytes,
    find_formats,
)

# Bytes of memory at run time for each byte of the weights file. Our kernels read the memory-mapped
# file, once for all sessions. With a file of 1.41 GB, nextn 1 and requests that sample, an engine
# took 1.33 GB (its share of the pages), 0.11 GB of it private.
MAPPED = 1.1
USUAL = 4096  # tokens, where caches take all their memory at once, or memory allows no more
CACHES = 1 / 3  # of the memory beside the weights; the prefix cache takes up to as much again


def choose_context(
    limit: int, memory: int | None, weights: int, state_bytes: Callable[[int], int]
) -> int:
    """Return the model's limit, or the largest power of two whose state fits, or USUAL.

    memory: the bytes that the machine has, free or not, so that it chooses the same each time.
    weights: the bytes of the weights file. state_bytes: counts those of the state for a context.
    """
    room = CACHES * ((memory or 0) - MAPPED * weights)
    choices = (limit, *(1 << power for power in range(limit.bit_length() - 1, 0, -1)))
    fitting = next((length for length in choices if state_bytes(length) <= room), 0)
    return max(min(limit, USUAL), fitting)


def count_weights_bytes(plan: Plan, folder: Path) -> int:
    """Return the bytes of a rank's weights file; the folder has the checkpoint's small files."""
    format_of = find_formats(folder, plan.config, plan.scheme)
    held = count_engine_classes(plan.config, format_of, plan.style, plan.ranks)
    return count_file_bytes(held)
