"""Weights that MLX's conversion changes: kv_b_proj in two, and Qwen's norms and convolutions."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

from mtpbuild.builder.checkpoint.readable import read_object
from mtpbuild.builder.checkpoint.side_files import CONFIG
from mtpbuild.builder.formats import Shape
from mtpbuild.builder.formats.mlx import METHOD as MLX
from mtpbuild.builder.formats.mlx import WORD
from mtpbuild.builder.lazy_torch import Tensor, torch
from mtpbuild.builder.weights.checkpoint import Checkpoint, FileEntry
from mtpbuild.runtime.errors import CheckpointError

# Means above which a norm of a head holds factors and not factors less 1. Of published heads the
# factors of the norms before `fc` have means of 0.27 and 0.49, others of about 1.
LEAST_JOINED, LEAST_FACTOR = 0.2, 0.5
logger = logging.getLogger(__name__)
KEYS, VALUES = "embed_q.", "unembed_out."  # of kv_b_proj; each head's keys are transposed
FIRST = f"{KEYS}0.weight"
PLAIN = "linear_attn.norm.weight"  # the only norm of Qwen's that holds its factor in any file


@dataclass(frozen=True)
class ConvertedWeight:
    """A weight that is made from others: their shapes, and what makes it from their values."""

    checkpoint: Checkpoint
    name: str
    shape: Shape
    sources: Mapping[str, Shape]
    change: Callable[..., Tensor]
    format = None

    def read(self) -> Tensor:
        return self.change(*map(self.checkpoint.read, self.sources))


def undo_changes(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the weights that MLX's conversion changed as they were."""
    tensors = {**checkpoint.tensors}
    model_type = str(read_object(checkpoint.folder / CONFIG).get("model_type"))
    factors = find_factors(checkpoint, model_type)
    for made in list_converted(checkpoint, factors):
        file = tensors[next(iter(made.sources))].file
        for name in checkpoint.check_sources(made.sources):
            tensors.pop(name, None)
        tensors[made.name] = FileEntry("F32", made.shape, file, made.name, source=made)
    return replace(checkpoint, tensors=tensors)


def find_factors(checkpoint: Checkpoint, model_type: str) -> set[str]:
    """Return which norms of Qwen3.5 hold their factors.

    MLX's conversion adds 1 to norms where it transposes convolutions, and in files of a head alone
    where names lack the prefix `mtp.`. Other tools leave out a head's norms, or some of them, so
    that the mean of each decides.
    """
    tensors, settings = checkpoint.tensors, checkpoint.settings
    turned = any(is_turned(name, entry.shape) for name, entry in tensors.items())
    alone = model_type.startswith("qwen3") and model_type.endswith("_mtp")
    prefixed = {name: name.startswith("mtp.") for name in tensors if is_norm(name)}
    usual = {name for name, of_mtp in prefixed.items() if turned or (alone and not of_mtp)}
    factors = {*usual}
    for name in prefixed if turned or alone or settings.get("quant_method") == MLX else ():
        if alone or prefixed[name]:
            with suppress(CheckpointError):  # the file may not be here yet
                least = LEAST_JOINED if "pre_fc_norm" in name else LEAST_FACTOR
                holds = checkpoint.tensor(name).float().mean().item() > least
                (factors.add if holds else factors.discard)(name)
    if unusual := sorted(factors ^ usual):
        said = f"has {'' if unusual[0] in factors else 'not '}added 1 to {len(unusual)} norms"
        why = f"of the MTP head ({unusual[0]}, ..), as their means tell; they are read so"
        note_once(f"{checkpoint.folder}: MLX's conversion {said} {why}")
    return factors


@cache  # a build opens a checkpoint several times
def note_once(note: str) -> None:
    logger.warning("note: %s", note)


def list_converted(checkpoint: Checkpoint, factors: Collection[str]) -> Iterator[ConvertedWeight]:
    """Yield the weights that MLX's conversion changed; none of other checkpoints.

    factors: the norms to which it added 1.
    """
    for name, entry in checkpoint.tensors.items():
        same = {name: entry.shape}
        if is_turned(name, entry.shape):
            shape = entry.shape[0], 1, entry.shape[1]
            yield ConvertedWeight(checkpoint, name, shape, same, lambda taps: taps.swapaxes(1, 2))
        elif name in factors:
            yield ConvertedWeight(checkpoint, name, entry.shape, same, lambda factor: factor - 1)
        elif name.endswith(FIRST):
            yield _join_kv_heads(checkpoint, name.removesuffix(FIRST))


def is_turned(name: str, shape: Shape) -> bool:
    return name.endswith("conv1d.weight") and len(shape) == 3 and shape[1] > 1 == shape[2]


def is_norm(name: str) -> bool:
    return "norm" in name and name.endswith(".weight") and not name.endswith(PLAIN)


def _join_kv_heads(checkpoint: Checkpoint, at: str) -> ConvertedWeight:
    """Return kv_b_proj [heads * (nope + v), latent]."""
    heads = 0
    while f"{at}{KEYS}{heads}.weight" in checkpoint.tensors:
        heads += 1
    names = (f"{at}{kind}{i}.weight" for kind in (KEYS, VALUES) for i in range(heads))
    sources = {name: _find_shape(checkpoint, name) for name in names}
    (latent, nope), (rows, _) = (sources[f"{at}{kind}0.weight"] for kind in (KEYS, VALUES))
    shape = heads * (nope + rows), latent
    return ConvertedWeight(checkpoint, f"{at}kv_b_proj.weight", shape, sources, join_heads)


def _find_shape(checkpoint: Checkpoint, name: str) -> Shape:
    """Return the shape of a weight, by its format if it is quantised; (0, 0) if it is missing."""
    if name not in checkpoint.tensors:
        return (0, 0)
    rows, words = checkpoint.tensors[name].shape
    format = checkpoint.format(name)
    return rows, words if format is None else words * WORD // format.bits


def join_heads(*parts: Tensor) -> Tensor:
    """Join each head's keys [latent, nope] and values [v, latent]."""
    heads = len(parts) // 2
    pairs = zip(parts[:heads], parts[heads:], strict=True)
    return torch.cat([rows for keys, values in pairs for rows in (keys.T, values)])
