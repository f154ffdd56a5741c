"""Write the weights files of an engine, once for all engines of a build."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from torch import Tensor

from mtpbuild.builder.engine import layout
from mtpbuild.builder.formats import make_entry
from mtpbuild.builder.formats.integers import count_coarse_blocks, describe_coarse_blocks
from mtpbuild.builder.models.common.weight import Readable, Share, convert_weights
from mtpbuild.builder.program.opened_model import OpenedModel, describe_counts
from mtpbuild.builder.stages import Watch, ignore
from mtpbuild.builder.weights.balance import BalancedReader
from mtpbuild.builder.weights.checkpoint import Loss
from mtpbuild.builder.weights.placed import ByteRange, read_places, write_weights
from mtpbuild.runtime.contract.manifest import WEIGHTS, hash_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WrittenWeights:
    """The weights file of one rank: the places of its tensors, and its hash."""

    places: dict[str, ByteRange]
    sha256: str


@dataclass
class EngineWeights:
    """The weights files of a model's ranks, written once for all engines of a build."""

    model: OpenedModel
    watch: Watch = ignore
    written: dict[int, WrittenWeights] = field(default_factory=dict)  # by rank

    def write(
        self, folder: Path, siblings: Path | None, rank: int = 0, there: str | None = None
    ) -> WrittenWeights:
        """Write folder/weights.safetensors, or link it to the same file of an engine in `siblings`.

        there: the file's sha256 if an interrupted build has already written it.
        """
        path = folder / WEIGHTS
        ranks = self.model.ranks
        inner = folder.name if ranks.tp > 1 else ""

        def link_sibling(sha256: str) -> bool:
            return siblings is not None and layout.share_file(path, sha256, siblings, inner)

        done = self.written.get(rank)
        if there is not None:
            done = WrittenWeights(read_places(path), there)
        elif done is None or not link_sibling(done.sha256):
            table = self.model.table.of_rank(rank)
            parameters = dict(self.model.model.named_parameters())
            entries = {name: make_entry(parameters[name]) for w in table for name in w.tensors}
            tensors = convert_weights(self._find_reader(), table, Share(ranks, rank))
            total = sum(prod(entry.shape) for entry in entries.values())
            tensors = self._report_tensors(tensors, total)
            done = WrittenWeights(write_weights(path, entries, tensors), hash_file(path))
            self._note_losses()
            link_sibling(done.sha256)
        self.written[rank] = done
        return done

    def _find_reader(self) -> Readable:
        """Return what reads the weights: for int8 caches, with keys and queries balanced."""
        model = self.model
        if not model.balanced_keys:
            return model.checkpoint
        return BalancedReader(model.checkpoint, model.stored, model.config)

    def _note_losses(self) -> None:
        """Log how many weights were rounded anew, and the relative error of all of them."""
        losses, rounded = self.model.checkpoint.losses, self.model.rounded()
        notes = list[str]()
        for names, held in (
            (rounded.keys() & losses.keys(), self.model.style.rounds_to),
            (losses.keys() - rounded.keys(), "fp16 scales and minima"),
        ):
            if names:
                formats = (self.model.checkpoint.format(name) for name in names)
                counts = describe_counts(format.name for format in formats if format is not None)
                error = sum((losses[name] for name in names), Loss()).relative
                notes.append(f"({counts}) are rounded to {held}, relative error {error:.2%}")
        if notes:
            logger.warning("note: quantised weights %s", "; others ".join(notes))

    def _report_tensors(
        self, tensors: Iterable[tuple[str, Tensor]], total: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors and report progress; then log how many blocks have lost accuracy."""
        done = coarse = 0
        for name, tensor in tensors:
            yield name, tensor
            done += tensor.numel()
            coarse += count_coarse_blocks(tensor)
            self.watch(f"write weights, {done / total:.0%}")
        if coarse:
            logger.warning("note: %s", describe_coarse_blocks(coarse))
