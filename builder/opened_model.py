"""Open a checkpoint: check its tensors, and make the model to compile.

This takes four stages, each of which reads the result of the one before: the checkpoint's tensors,
the configuration that they confirm, the formats that weights stay in, and the model.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from mtpbuild.builder.checkpoint.generation import GenerationIds
from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.models import Family, ModelConfig, family_of
from mtpbuild.builder.models.common.blocks import holder, put
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.layers import Attention, Rope
from mtpbuild.builder.models.common.moe import ExpertRows, Gate, GatheredMoE
from mtpbuild.builder.models.common.moe_weights import STACKS, by_outputs, like_routed, with_shared
from mtpbuild.builder.models.common.precision import FLOATS, hold_in
from mtpbuild.builder.plan import Plan
from mtpbuild.builder.program.programs import Program, make_programs
from mtpbuild.builder.weights.formats import Format
from mtpbuild.builder.weights.formats.integers import INT4, INT8
from mtpbuild.builder.weights.made import WHOLE, Share, Weight
from mtpbuild.builder.weights.requantised import Requantised, see
from mtpbuild.builder.weights.scheme import Scheme
from mtpbuild.builder.weights.stored import Checkpoint, open_slice
from mtpbuild.runtime.contract.manifest import FloatType, ModelInfo, WeightsType
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.ranks import ALONE, Ranks
from mtpbuild.runtime.tokenizer import TOKENIZER, read_backend

if TYPE_CHECKING:
    from mtpbuild.builder.recipe import FoundModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightStyle:
    """The way in which a target's graphs hold weights."""

    formats: tuple[str, ...] = ()  # number formats that graphs compute with as they are
    dtype: FloatType = "float32"  # the type of all other weights
    expert_rows: bool = False  # unquantised experts are stored by outputs, for the CPU's op
    join_shared: bool = False  # a shared expert becomes the last routed one if it fits
    for_gpu: bool = False  # a bfloat16 model has a bfloat16 head, too
    cpu_kernels: bool = False  # products are packed for the CPU's library


@dataclass(frozen=True)
class Held:
    """The weights that an engine holds in another way than its family's table says."""

    formats: Mapping[str, Format]  # by name of a weight that stays quantised
    by_outputs: Set[str]  # names of experts' weights that are stored by outputs
    joined: Set[str]  # MoE modules whose shared expert is the last routed one
    packed: Set[str]  # names of weights that are packed for the CPU's kernels

    def table(self, table: list[Weight]) -> list[Weight]:
        """Return the engine's table, made from a family's table of a rank or of all experts."""
        table = with_shared(table, self.joined)
        found = (
            replace(weight, format=self.formats.get(weight.name), packed=weight.name in self.packed)
            for weight in table
        )
        return [by_outputs(w) if w.name in self.by_outputs else w for w in found]


@dataclass(frozen=True)
class OpenedModel:
    """A checked checkpoint with its model.

    Weights go to disk one by one; graphs need no weights in memory.
    """

    source: "FoundModel"
    ids: GenerationIds
    ranks: Ranks  # `model` is the part of one of them; all have the same graph
    scheme: Scheme | None  # how the build quantises weights; None: they stay as stored
    style: WeightStyle
    stored: Checkpoint
    config: ModelConfig  # with the MTP modules that the checkpoint really holds
    checkpoint: Checkpoint  # `stored`, or a view of it as the scheme quantises it
    held: Held
    model: CausalLM
    parameters: int  # of all ranks

    @property
    def family(self) -> Family:
        return family_of(self.config)

    @property
    def table(self) -> list[Weight]:
        """The table of weights with the experts of all ranks."""
        return self.held.table(all_experts(self.config, self.ranks))

    def weight_table(self, rank: int = 0) -> list[Weight]:
        """Return the table of a rank's weights, in the order of use."""
        return self.held.table(self.family.weight_table(self.config, Share(self.ranks, rank)))

    def dequantised(self) -> Counter[str]:
        """Count, by format, the quantised weights that the engine holds in floats."""
        names = {stored.name for w in self.table if w.format is None for stored in w.stored}
        formats = map(self.checkpoint.format, names)
        return Counter(format.name for format in formats if format is not None)

    def tell_copies(self) -> None:
        """Log which MTP modules have an embedding or a head of their own."""
        own = {"embedding": self.config.own_embeddings, "head": self.config.own_heads}
        for what, modules in own.items():
            if modules:
                names = ", ".join(self.family.module_name(self.config, j) for j in modules)
                note = "note: the %s stored in %s differs from the trunk's: drafts use it"
                logger.warning(note, what, names)

    def tell_tower(self) -> None:
        """Log that a vision tower is left out, if the checkpoint has one."""
        if count := self.stored.tower:
            note = "note: the vision tower (%d tensors) is left out: the engine reads text alone"
            logger.warning(note, count)

    def tell_formats(self) -> None:
        """Log a note if weights are dequantised, or can't be quantised as asked."""
        dtype, counts = self.style.dtype, sorted(self.dequantised().items())
        if found := ", ".join(f"{count} in {name}" for name, count in counts):
            note = "note: quantised weights (%s) are dequantised: the engine holds them in %s"
            logger.warning(note, found, dtype)
        if count := self.older_scales:
            note = (
                "note: %d weights with fp32 scales get fp16 ones, or are quantised anew if inexact"
            )
            logger.warning(note, count)
        if unfit := self.unfit:
            note = "note: %d weights stay in %s: their columns do not split into blocks (%s, ..)"
            logger.warning(note, len(unfit), dtype, unfit[0])

    @property
    def older_scales(self) -> int:
        """The number of kept weights of the checkpoint whose scales the engine rounds."""
        names = {stored.name for w in self.table if w.format is not None for stored in w.stored}
        formats = [format for name in names if (format := self.checkpoint.format(name))]
        return sum(format is not format.kept for format in formats)

    @property
    def unfit(self) -> tuple[str, ...]:
        """The weights that should be quantised, but whose columns do not split into blocks."""
        return self.checkpoint.unfit if isinstance(self.checkpoint, Requantised) else ()

    @property
    def weights_type(self) -> WeightsType:
        """The number format of most products."""
        return self.style.dtype if self.format is None else cast(WeightsType, self.format.name)

    @property
    def format(self) -> Format | None:
        """The quantised format of most products, or None."""
        formats = Counter(self.held.formats.values()).most_common(1)
        return formats[0][0] if formats else None

    @property
    def block_size(self) -> int | None:
        """The number of columns that share a scale in integer products; None for other formats."""
        return self.format.block if self.format is not None and self.format.packs else None

    @property
    def by_cpu_kernels(self) -> bool:
        """Return whether the engine's operators are those of the CPU's library."""
        return self.style.cpu_kernels

    @property
    def may_halve_caches(self) -> bool:
        """Return whether caches may be bfloat16: products are integers, attention is by our ops."""
        attention = [m for m in self.model.modules() if isinstance(m, Attention)]
        by_ops = all(getattr(module, "by_ops", False) for module in attention)
        return by_ops and self.by_cpu_kernels and self.block_size is not None

    def programs(self, plan: Plan) -> tuple[Program, ...]:
        return make_programs(plan, self.model)

    def info(self) -> ModelInfo:
        config = {n: v for n, v in vars(self.config).items() if n in ModelInfo.model_fields}
        return ModelInfo(
            name=self.source.name,
            architecture=self.family.name,
            parameters=self.parameters,
            **config,
            **vars(self.ids),
        )


def open_model(
    source: "FoundModel",
    config: ModelConfig,
    ids: GenerationIds,
    style: WeightStyle,
    *,
    ranks: Ranks = ALONE,
    layers: LayersSlice | None = None,
    drafts: bool = True,
    draft_ids: tuple[int, ...] = (),
    scheme: Scheme | None = None,
    device: str = "cpu",
) -> OpenedModel:
    """Check a checkpoint and make its model, whose weights have no values yet.

    layers: the slice that `config` describes, if any. drafts: whether MTP modules are needed.
    draft_ids: the tokens that drafts are chosen from, () for all. device: "meta" if values are
    never read. Raises CheckpointError.
    """
    check_tokenizer(source.folder, config)
    stored = open_slice(source.folder, layers)
    config = replace(stored.settle(config, drafts), draft_ids=draft_ids)
    checkpoint = see(stored, config, scheme)
    held = choose(checkpoint, config, style, ranks)
    model = make_model(config, style, held, ranks, device)
    parameters = count_parameters(config)
    return OpenedModel(
        *(source, ids, ranks, scheme, style, stored, config, checkpoint, held, model, parameters)
    )


def count_parameters(config: ModelConfig) -> int:
    """Count the checkpoint's parameters; a tied embedding, which makes two weights, counts once."""
    table = family_of(config).weight_table(config, WHOLE)
    shapes = {stored.name: stored.shape for weight in table for stored in weight.stored}
    return sum(map(prod, shapes.values()))


def check_tokenizer(folder: Path, config: ModelConfig) -> None:
    path = folder / TOKENIZER
    if not path.exists():
        return  # such an engine runs token ids only
    try:
        size = read_backend(path).get_vocab_size()
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if size > (limit := config.vocab_size):
        raise CheckpointError(f"{path}: {size} tokens, config.json has vocab_size {limit}")


def all_experts(config: ModelConfig, ranks: Ranks) -> list[Weight]:
    """Return the family's table with the routed experts of all ranks."""
    share = Share(Ranks(attention_dp=ranks.attention_dp))
    return family_of(config).weight_table(config, share)


def choose(checkpoint: Checkpoint, config: ModelConfig, style: WeightStyle, ranks: Ranks) -> Held:
    """Decide how the engine holds weights: alike on all ranks, so that they share their graphs."""
    share, every = Share(ranks), all_experts(config, ranks)
    own = family_of(config).weight_table(config, share)
    joined = fitting(checkpoint, every, like_routed(own, share)) if style.join_shared else set()
    every, own = with_shared(every, joined), with_shared(own, joined)
    formats = dict[str, Format]()
    for weight, of_all in zip(own, every, strict=True):
        format, *others = stored_formats(checkpoint, of_all)
        if format is None or others or format.name not in style.formats:
            continue
        if can_stay(replace(weight, format=format), share):
            formats[weight.name] = format
    formats = in_pairs(own, formats)
    if style.cpu_kernels:  # attention never expands its cache: it reads per-head products alone
        head = formats.get("lm_head")
        narrow = INT4 if head is INT4 else INT8
        formats |= dict.fromkeys(quantised_heads(own, formats), narrow)
    packed = {weight.name for weight in own if weight.multiplied} if style.cpu_kernels else set()
    rows = plain_experts(own, formats) - packed if style.expert_rows else set[str]()
    return Held(formats, rows, joined, packed)


def stored_formats(checkpoint: Checkpoint, weight: Weight) -> set[Format | None]:
    """Return the formats in which engines keep the stored tensors that make a weight."""
    formats = {checkpoint.format(stored.name) for stored in weight.stored}
    return {None if format is None else format.kept for format in formats}


def fitting(checkpoint: Checkpoint, every: list[Weight], modules: Set[str]) -> set[str]:
    """Return the MoE modules whose shared expert has the same format as all their routed ones."""
    named = {weight.name: weight for weight in every}

    def formats(weight: str) -> set[Format | None]:
        return stored_formats(checkpoint, named[weight])

    def fits(module: str) -> bool:
        own = ((f"{module}.{leaf}", f"{module}.shared_experts.{leaf}") for leaf in STACKS)
        return all(formats(routed) == formats(shared) for routed, shared in own)

    return set(filter(fits, modules))


def can_stay(weight: Weight, share: Share) -> bool:
    """Return whether programs can compute with the weight's format."""
    format = weight.format
    assert format is not None
    fits = format.looks_up if weight.looked_up else weight.joined is not None
    return fits and format.can_split(share.ranks.tp, weight.scale_group(share))


def in_pairs(own: list[Weight], formats: Mapping[str, Format]) -> dict[str, Format]:
    """Drop integer formats of experts if only one of their two products is in integers."""
    stacks = {weight.name.rpartition(".")[0] for weight in own if weight.slices > 1}

    def stays(name: str, format: Format) -> bool:
        layer = name.rpartition(".")[0]
        others = (formats.get(f"{layer}.{leaf}") for leaf in STACKS)
        alike = all(other is not None and other.packs for other in others)
        return layer not in stacks or not format.packs or alike

    return {name: format for name, format in formats.items() if stays(name, format)}


def quantised_heads(own: list[Weight], formats: Mapping[str, Format]) -> Iterator[str]:
    """Yield the per-head products to quantise: those of layers whose o_proj is in integers.

    In fp32 the absorbed projections of a 10B model are a third of the bytes that a token reads.
    """
    for weight in own:
        beside = formats.get(f"{weight.name.rpartition('.')[0]}.o_proj")
        if weight.wide_heads and beside is not None and beside.packs:
            _, inputs, outputs = weight.slice_shape
            if INT8.fits((outputs, inputs)):
                yield weight.name


def plain_experts(own: list[Weight], formats: Mapping[str, Format]) -> set[str]:
    """Return the stacked weights of experts in layers where neither product is quantised."""
    quantised = {name.rpartition(".")[0] for name in formats}
    stacked = (weight.name for weight in own if weight.slices > 1)
    return {name for name in stacked if name.rpartition(".")[0] not in quantised}


def make_model(
    config: ModelConfig, style: WeightStyle, held: Held, ranks: Ranks, device: str
) -> CausalLM:
    """Make the model with uninitialised weights, whose memory is never touched."""
    family, share = family_of(config), Share(ranks)
    with torch.device(device):
        model = family.make_model(config, ranks)
        hold_in(model, FLOATS[style.dtype], style.for_gpu)
        join_shared(model, held.joined)
        model.cpu_kernels = style.cpu_kernels
        hold(model, held.table(family.weight_table(config, share)), share)
        for module in model.modules():
            if isinstance(module, Gate | Rope):
                module.fused = model.cpu_kernels  # the library has an operator for them
        for name in held.by_outputs:
            put(model, name, ExpertRows(model.get_parameter(name)))
    return model


def join_shared(model: CausalLM, modules: Set[str]) -> None:
    """Make the shared expert of these modules the last of their routed experts."""
    for name in modules:
        module = model.get_submodule(name)
        assert isinstance(module, GatheredMoE)
        module.join_shared()


def hold(model: CausalLM, table: Iterable[Weight], share: Share) -> None:
    """Replace the weights that stay quantised, or are packed, by parameters of their own form."""
    for weight in table:
        if weight.format is not None or weight.packed:
            shape = model.get_parameter(weight.name).shape
            put(model, weight.name, holder(weight, shape, share))
