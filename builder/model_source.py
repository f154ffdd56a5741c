"""The heavy half of the pipeline, imported when there is something to build: it needs torch."""

import logging
import typing
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from mtpbuild.builder import layout
from mtpbuild.builder.checkpoint.generation import GenerationIds
from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.checkpoint.tensors import (
    Checkpoint,
    open_checkpoint,
    open_slice,
    stream_pieces,
    stream_weights,
)
from mtpbuild.builder.models.common.blocks import put
from mtpbuild.builder.models.common.precision import FLOATS, hold_in
from mtpbuild.builder.models.common.share import WHOLE, Share
from mtpbuild.builder.models.deepseek_v3.config import ModelConfig
from mtpbuild.builder.models.deepseek_v3.model import DeepseekV3
from mtpbuild.builder.models.deepseek_v3.weights import Weight, weight_table
from mtpbuild.builder.plan import Plan
from mtpbuild.builder.program.programs import Program, make_programs
from mtpbuild.builder.quantize.kept import Kept, can_stay, in_pairs
from mtpbuild.builder.weights_file import WEIGHTS, Placed, read_places, write_weights
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.manifest import FloatType, ModelInfo, WeightsType, hash_file
from mtpbuild.runtime.tokenizer import TOKENIZER, read_backend


@dataclass(frozen=True)
class WrittenWeights:
    places: dict[str, Placed]
    hashes: dict[str, str]

    @staticmethod
    def remove(folder: Path) -> None:
        (folder / WEIGHTS).unlink()


@dataclass
class ModelSource:
    """A checked checkpoint. Its weights go to disk one by one; graphs are traced without them."""

    name: str
    folder: Path
    config: ModelConfig
    ids: GenerationIds
    checkpoint: Checkpoint = field(init=False)
    table: list[Weight] = field(init=False)  # as the share's, but of all ranks' experts
    model: DeepseekV3 = field(init=False)
    device: str = "cpu"  # meta: only to look at
    formats: tuple[str, ...] = ()  # that the target runs as they are
    layers: LayersSlice | None = None  # `config` is then the slice's
    share: Share = WHOLE  # of a rank: the model is its part, the same for all ranks
    dtype: FloatType = "float32"
    parameters: int = field(init=False)
    kept: dict[str, Kept] = field(init=False)  # by weight, what stays in them
    weights: dict[int, WrittenWeights] = field(default_factory=dict)  # by rank

    def __post_init__(self) -> None:
        self._check_tokenizer()
        self.checkpoint = open_slice(self.folder, self.layers)
        self.checkpoint.check(self.config)
        self.table = weight_table(self.config, replace(self.share, tp=1, ep=1))
        with torch.device(self.device):
            # Uninitialised: its memory is never touched.
            self.model = DeepseekV3(self.config, self.share)
        hold_in(self.model, FLOATS[self.dtype])
        self.parameters = sum(p.numel() for p in self.model.parameters())
        if self.share.tp > 1:
            with torch.device("meta"):
                self.parameters = sum(p.numel() for p in DeepseekV3(self.config).parameters())
        self.kept = in_pairs(dict(self._keep()))
        with torch.device(self.device):
            for name, kept in self.kept.items():
                put(self.model, name, kept.module(self.model.get_parameter(name).shape))

    def _keep(self) -> Iterator[tuple[str, Kept]]:
        for whole, weight in zip(self.table, weight_table(self.config, self.share), strict=True):
            format = self.checkpoint.format_of(whole)  # of all ranks' experts
            if format is not None and format.name in self.formats:
                kept = Kept(weight, format, self.share)
                if can_stay(kept):
                    yield weight.name, kept

    def _check_tokenizer(self) -> None:
        path = self.folder / TOKENIZER
        if not path.is_file():
            return  # such an engine runs token ids only
        try:
            size = read_backend(path).get_vocab_size()
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        if size > self.config.vocab_size:
            raise CheckpointError(
                f"{path}: {size} tokens, config.json has vocab_size {self.config.vocab_size}"
            )

    def write_weights(
        self,
        folder: Path,
        siblings: Path | None,
        rank: int = 0,
        there: Mapping[str, str] | None = None,
    ) -> WrittenWeights:
        """folder/weights.safetensors; a hard link where one of `siblings` has the same one.

        there: what an interrupted build has finished in the folder, name -> sha256.
        """
        path, share = folder / WEIGHTS, replace(self.share, rank=rank)
        within = folder.name if share.tp > 1 else ""

        def shared(digest: str) -> bool:
            return siblings is not None and layout.share_file(path, digest, siblings, within)

        if there and WEIGHTS in there:
            places = read_places(path)
            self.weights[rank] = WrittenWeights(places, {WEIGHTS: there[WEIGHTS]})
            return self.weights[rank]
        done = self.weights.get(rank)
        if done is not None and shared(done.hashes[WEIGHTS]):
            return done
        parameters = dict(self.model.named_parameters())
        table = weight_table(self.config, share)
        names = [
            name
            for weight in table
            for name in (
                self.kept[weight.name].stored if weight.name in self.kept else (weight.name,)
            )
        ]
        shapes = {name: tuple(parameters[name].shape) for name in names}
        dtypes = {name: parameters[name].dtype for name in names}
        tensors = stream_pieces(self.checkpoint, table, self.kept, share)
        places = write_weights(path, shapes, tensors, dtypes)
        digest = hash_file(path)
        shared(digest)
        self.weights[rank] = WrittenWeights(places, {WEIGHTS: digest})
        return self.weights[rank]

    def dequantised(self) -> Counter[str]:
        """How many weights become larger than they were, by format."""
        sources = {s.name for w in self.table if w.name not in self.kept for s in w.sources}
        formats = (self.checkpoint.format(name) for name in sources)
        return Counter(format.name for format in formats if format is not None)

    def tell_formats(self) -> None:
        """Say so, if any do."""
        counts = sorted(self.dequantised().items())
        if counts:
            found = ", ".join(f"{count} in {name}" for name, count in counts)
            logging.getLogger(__name__).warning(
                "note: quantised weights (%s) are dequantised: the engine holds them in %s",
                found,
                self.dtype,
            )

    @property
    def weights_type(self) -> WeightsType:
        """What most of the products hold."""
        formats = Counter(kept.format.name for kept in self.kept.values()).most_common(1)
        return typing.cast(WeightsType, formats[0][0]) if formats else self.dtype

    def programs(self, plan: Plan) -> tuple[Program, ...]:
        return make_programs(plan, self.model)

    def info(self) -> ModelInfo:
        c = self.config
        return ModelInfo(
            name=self.name,
            architecture="DeepseekV3ForCausalLM",
            parameters=self.parameters,
            vocab_size=c.vocab_size,
            num_hidden_layers=c.num_hidden_layers,
            num_nextn_predict_layers=c.num_nextn_predict_layers,
            max_position_embeddings=c.max_position_embeddings,
            bos_token_id=self.ids.bos,
            eos_token_ids=self.ids.eos,
            thinking_token_ids=self.ids.thinking,
        )


def load_model(folder: Path, config: ModelConfig, dtype: FloatType = "float32") -> DeepseekV3:
    """The program's model with its weights in memory, for running it eagerly."""
    checkpoint, model = open_checkpoint(folder), DeepseekV3(config)
    hold_in(model, FLOATS[dtype])
    types = {name: weight.dtype for name, weight in model.named_parameters()}
    weights = stream_weights(checkpoint, checkpoint.check(config))
    model.load_state_dict({name: w.to(types[name]) for name, w in weights}, assign=True)
    return model.eval()
