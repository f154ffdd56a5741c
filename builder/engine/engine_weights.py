"""The weights file of an engine: written rank by rank, once for all engines of a build."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mtpbuild.builder.checkpoint.tensors import stream_pieces
from mtpbuild.builder.checkpoint.write import NAMES
from mtpbuild.builder.engine import layout
from mtpbuild.builder.engine.weights_file import WEIGHTS, Placed, read_places, write_weights
from mtpbuild.builder.model_source import ModelSource
from mtpbuild.builder.models.common.weights import Share
from mtpbuild.builder.quantize.formats import Part
from mtpbuild.runtime.contract.manifest import hash_file


@dataclass(frozen=True)
class WrittenWeights:
    places: dict[str, Placed]
    hashes: dict[str, str]


@dataclass
class EngineWeights:
    """Writes the weights of a model's ranks, and remembers which files it wrote."""

    source: ModelSource
    written: dict[int, WrittenWeights] = field(default_factory=dict)  # by rank

    def write(
        self,
        folder: Path,
        siblings: Path | None,
        rank: int = 0,
        there: Mapping[str, str] | None = None,
    ) -> WrittenWeights:
        """folder/weights.safetensors; a hard link where one of `siblings` has the same one.

        there: what an interrupted build has finished in the folder, name -> sha256.
        """
        path, source = folder / WEIGHTS, self.source
        within = folder.name if source.ranks.tp > 1 else ""

        def shared(digest: str) -> bool:
            return siblings is not None and layout.share_file(path, digest, siblings, within)

        done = self.written.get(rank)
        if there and WEIGHTS in there:
            done = WrittenWeights(read_places(path), {WEIGHTS: there[WEIGHTS]})
        elif done is None or not shared(done.hashes[WEIGHTS]):
            table, kept = source.weight_table(rank), source.kept
            parameters = dict(source.model.named_parameters())
            stored = (kept[w.name].stored if w.name in kept else (w.name,) for w in table)
            weights = {name: parameters[name] for names in stored for name in names}
            parts = {n: Part(NAMES[w.dtype], tuple(w.shape)) for n, w in weights.items()}
            tensors = stream_pieces(source.checkpoint, table, kept, Share(source.ranks, rank))
            places = write_weights(path, parts, tensors)
            done = WrittenWeights(places, {WEIGHTS: hash_file(path)})
            shared(done.hashes[WEIGHTS])
        self.written[rank] = done
        return done
