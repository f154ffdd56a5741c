"""Open a checkpoint: check its tensors, and make the model to compile.

There are four stages, and each reads the results of those before it: the checkpoint's tensors, the
configuration that they confirm, the formats that weights stay in, and the model.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from mtpbuild.builder.checkpoint.config import HEAD
from mtpbuild.builder.checkpoint.generation import GenerationIds
from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.formats import FORMATS, Format
from mtpbuild.builder.formats.integers import Integers
from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.models import Family, ModelConfig, find_family_of
from mtpbuild.builder.models.common.blocks import make_weight_module, replace_parameter
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.moe import ExpertStack
from mtpbuild.builder.models.common.precision import FLOATS, set_dtype
from mtpbuild.builder.models.common.weight import Layout, Share, StoredTensor
from mtpbuild.builder.models.heads import find_head_of
from mtpbuild.builder.weights.bit_budget import spend_bits
from mtpbuild.builder.weights.checkpoint import Checkpoint
from mtpbuild.builder.weights.drafter_weights import join_brought
from mtpbuild.builder.weights.head import open_slice, refuse_other_trunk
from mtpbuild.builder.weights.quantised_view import QuantisedView, format_by, requantise
from mtpbuild.builder.weights.scheme import IN_FLOATS, IN_INT8, Scheme
from mtpbuild.builder.weights.table import WeightTable, choose_formats
from mtpbuild.runtime.contract.manifest import WeightsType
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.ranks import ALONE, Ranks
from mtpbuild.runtime.text.tokenizer import TOKENIZER, read_backend

if TYPE_CHECKING:
    from mtpbuild.builder.plan.recipe import FoundModel


@dataclass(frozen=True)
class OpenedModel:
    """A checked checkpoint with its model, whose weights have no values.

    Weights are written to disk one by one, and graphs need no values.
    """

    source: "FoundModel"
    ids: GenerationIds
    ranks: Ranks  # `model` is one rank's part; all ranks have the same graph
    scheme: Scheme | None  # how the build quantises weights; None: they stay as stored
    style: GraphStyle
    stored: Checkpoint
    config: ModelConfig  # with the MTP modules that the checkpoint really holds
    checkpoint: Checkpoint | QuantisedView  # `stored`, or a view of it as the scheme quantises it
    table: WeightTable
    model: CausalLM

    @property
    def family(self) -> Family:
        return find_family_of(self.config)

    def quantised(self) -> Iterator[tuple[Format, Format | None]]:
        """Yield the formats of each quantised weight, in the checkpoint and in the engine."""
        for name, held in self.table.stored_formats.items():
            if (format := self.checkpoint.format(name)) is not None:
                yield format, held

    def dequantised(self) -> Counter[str]:
        """Count, by format, the quantised weights that the engine holds in floats."""
        return Counter(format.name for format, held in self.quantised() if held is None)

    def rounded(self) -> dict[str, str]:
        """Return the format of each weight that the engine has to round anew, by name."""
        formats = dict[str, str]()
        for name, held in self.table.stored_formats.items():
            format = self.checkpoint.format(name)
            if held is None or format is None or held.represents(format.engine_format):
                continue
            formats[name] = format.name
        return formats

    @property
    def unfit(self) -> tuple[str, ...]:
        """The weights that should be quantised, but whose columns do not split into blocks."""
        return self.checkpoint.unfit if isinstance(self.checkpoint, QuantisedView) else ()

    @property
    def weights_type(self) -> WeightsType:
        """The number format of most products."""
        return self.style.dtype if self.format is None else cast(WeightsType, self.format.name)

    @property
    def format(self) -> Format | None:
        """The quantised format of most products, or None."""
        products = (weight for weight in self.table if not weight.per_head)
        formats = Counter(weight.format.name for weight in products if weight.format is not None)
        return FORMATS[formats.most_common(1)[0][0]] if formats else None

    @property
    def block_size(self) -> int | None:
        """The number of columns that share a scale in integer products; None for other formats."""
        return self.format.block if self.format is not None and self.format.packs else None

    @property
    def weight_bytes(self) -> int:
        """The bytes of one rank's weights."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    @property
    def balanced_keys(self) -> bool:
        """Whether keys and queries are balanced, as caches are int8."""
        rows = self.config.find_key_rows("model.layers.0.")
        return self.style.cache_dtype == "int8" and rows is not None

    @property
    def may_narrow_caches(self) -> bool:
        """Whether caches may be narrower than fp32: if our kernels read integer weights."""
        return self.style.packs_weights and self.block_size is not None


def describe_counts(formats: Iterable[str]) -> str:
    """Say how often each format occurs; "" if there is none."""
    return ", ".join(f"{count:,} in {name}" for name, count in sorted(Counter(formats).items()))


def open_model(
    source: "FoundModel",
    config: ModelConfig,
    ids: GenerationIds,
    style: GraphStyle,
    *,
    ranks: Ranks = ALONE,
    layers: LayersSlice | None = None,
    drafts: bool = True,
    draft_ids: tuple[int, ...] = (),
    brought: Sequence[Path] = (),
    scheme: Scheme | None = None,
    device: str = "cpu",
) -> OpenedModel:
    """Check a checkpoint and make its model, whose weights have no values yet.

    layers: the slice that `config` describes, if any. drafts: whether MTP modules are needed.
    draft_ids: the tokens that drafts are chosen from, () for all. brought: files of a drafter's own
    weights. device: "meta" if no weight's value will be read. Raises CheckpointError.
    """
    check_tokenizer(source.folder, config)
    stored = open_slice(source.folder, layers, source.mtp)
    if source.mtp is not None:
        refuse_other_trunk(stored, source.mtp)
    config = replace(stored.settle(config, drafts), draft_ids=draft_ids)
    stored, config = join_brought(stored, config, brought)
    table = stored.check(config, ranks)
    checkpoint: Checkpoint | QuantisedView = stored
    if scheme == IN_FLOATS:
        style = replace(style, formats=(), rounds_to=None)
    elif scheme is not None:
        scheme = spend_bits(scheme, config, stored)
        checkpoint = requantise(stored, config, scheme, table.stored.values())
    held = IN_INT8 if scheme is None and holds_integers(stored, table) else IN_FLOATS
    table = choose_formats(
        table,
        lambda weight: checkpoint.format(weight.name) or format_head(held, config, weight),
        style,
    )
    model = make_model(table, style, device)
    return OpenedModel(source, ids, ranks, scheme, style, stored, config, checkpoint, table, model)


def holds_integers(checkpoint: Checkpoint, table: WeightTable) -> bool:
    """Return whether some weights of the trunk are stored as integers."""
    names = (name for name in table.stored if not name.startswith(f"{HEAD}."))
    return any(isinstance(checkpoint.format(name), Integers) for name in names)


def format_head(scheme: Scheme, config: ModelConfig, weight: StoredTensor) -> Format | None:
    """Return a scheme's format for a weight of a published head; None for others.

    Drafts of floats beside a trunk of integers would cost more time than they save.
    """
    return format_by(scheme, config, weight) if weight.name.startswith(f"{HEAD}.") else None


def check_tokenizer(folder: Path, config: ModelConfig) -> None:
    path = folder / TOKENIZER
    if not path.exists():
        return  # an engine without a tokenizer runs on token ids
    try:
        size = read_backend(path).get_vocab_size()
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if size > (limit := config.vocab_size):
        raise CheckpointError(f"{path}: {size} tokens, config.json has vocab_size {limit}")


def make_model(table: WeightTable, style: GraphStyle, device: str) -> CausalLM:
    """Make the model with uninitialised weights, whose memory is never touched."""
    share = Share(table.ranks)
    with torch.device(device):
        model = find_family_of(table.config).make_model(table.config, table.ranks)
        if table.config.head is not None:
            find_head_of(table.config.head).attach(model)
        set_dtype(model, FLOATS[style.dtype], style.for_gpu)
        for name in table.joined:
            module = model.get_submodule(name)
            assert isinstance(module, ExpertStack)
            module.stack_shared_expert()
        if table.shares_embedding:
            model.embed_tokens = None
        for weight in table.of_rank(0):
            if weight.format is not None or weight.layout is not Layout.PLAIN:
                replace_parameter(
                    model,
                    weight.name,
                    make_weight_module(weight, model.get_parameter(weight.name), share),
                )
    return model
