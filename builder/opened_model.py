"""A checkpoint that was checked and the model that it makes: what there is to compile.

It is opened in four stages, each a value that the next one reads: the checkpoint's tensors, the
configuration that they bear out, the formats that weights stay in, and the model.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from mtpbuild.builder.checkpoint.generation import GenerationIds
from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.models import Family, ModelConfig, family_of
from mtpbuild.builder.models.common.blocks import holder, put
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.moe import ExpertRows, GatheredMoE
from mtpbuild.builder.models.common.moe_weights import STACKS, by_outputs, like_routed, with_shared
from mtpbuild.builder.models.common.precision import FLOATS, hold_in
from mtpbuild.builder.plan import Plan
from mtpbuild.builder.program.programs import Program, make_programs
from mtpbuild.builder.weights.formats import GROUP, INT8, Format, Integers
from mtpbuild.builder.weights.made import Share, Weight
from mtpbuild.builder.weights.requantised import Requantised, see
from mtpbuild.builder.weights.scheme import Scheme
from mtpbuild.builder.weights.stored import Checkpoint, open_slice
from mtpbuild.plugins.matmul_nbits.op import BLOCK
from mtpbuild.runtime.contract.manifest import FloatType, ModelInfo, WeightsType
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.ranks import ALONE, Ranks
from mtpbuild.runtime.tokenizer import TOKENIZER, read_backend

if TYPE_CHECKING:
    from mtpbuild.builder.recipe import FoundModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightStyle:
    """How a target's graphs hold weights."""

    formats: tuple[str, ...] = ()  # that they run as they are
    dtype: FloatType = "float32"  # of all other weights
    absorbed: bool = False  # attention reads projections by head alone: it never expands its cache
    expert_rows: bool = False  # plain experts lie by outputs, for the op of the CPU's graphs
    join_shared: bool = False  # shared experts stand behind the routed ones where they fit there
    for_gpu: bool = False  # in bfloat16 the head is too


@dataclass(frozen=True)
class Held:
    """The weights that an engine holds otherwise than its family's table says, on all ranks."""

    formats: Mapping[str, Format]  # of weights that stay quantised
    by_outputs: Set[str]  # weights of experts that lie by outputs
    joined: Set[str]  # MoE modules whose shared expert stands behind the routed ones

    def table(self, table: list[Weight]) -> list[Weight]:
        """A family's table, of a rank or of all experts, as the engine holds it."""
        found = (
            replace(weight, format=self.formats.get(weight.name))
            for weight in with_shared(table, self.joined)
        )
        return [by_outputs(w) if w.name in self.by_outputs else w for w in found]


@dataclass(frozen=True)
class OpenedModel:
    """A checked checkpoint. Its weights go to disk one by one; graphs are traced without them."""

    source: "FoundModel"
    ids: GenerationIds
    ranks: Ranks  # the model is the part of one rank; all have the same graph
    scheme: Scheme | None  # by which weights are quantised anew; None: they are as stored
    style: WeightStyle
    stored: Checkpoint
    config: ModelConfig  # as the checkpoint bears it out
    checkpoint: Checkpoint  # as `stored`, or as the scheme quantises it
    held: Held
    model: CausalLM
    parameters: int  # of all ranks

    @property
    def family(self) -> Family:
        return family_of(self.config)

    @property
    def table(self) -> list[Weight]:
        """What all ranks' weights are made of."""
        return self.held.table(all_experts(self.config, self.ranks))

    def weight_table(self, rank: int = 0) -> list[Weight]:
        """What a rank's weights are made of, in the order of use."""
        return self.held.table(self.family.weight_table(self.config, Share(self.ranks, rank)))

    def dequantised(self) -> Counter[str]:
        """Count the weights that become larger than they were, by format."""
        names = {stored.name for w in self.table if w.format is None for stored in w.stored}
        formats = map(self.checkpoint.format, names)
        return Counter(format.name for format in formats if format is not None)

    def tell_copies(self) -> None:
        """Note in the log which MTP modules have an embedding or a head of their own."""
        own = {"embedding": self.config.own_embeddings, "head": self.config.own_heads}
        for what, modules in own.items():
            if modules:
                names = ", ".join(self.family.module_name(self.config, j) for j in modules)
                note = "note: the %s stored in %s differs from the trunk's: drafts use it"
                logger.warning(note, what, names)

    def tell_formats(self) -> None:
        """Note it in the log if any weights are dequantised, or can't be quantised as asked."""
        dtype, counts = self.style.dtype, sorted(self.dequantised().items())
        if found := ", ".join(f"{count} in {name}" for name, count in counts):
            note = "note: quantised weights (%s) are dequantised: the engine holds them in %s"
            logger.warning(note, found, dtype)
        if unfit := self.unfit:
            note = "note: %d weights stay in %s: their columns do not split into blocks (%s, ..)"
            logger.warning(note, len(unfit), dtype, unfit[0])

    @property
    def unfit(self) -> tuple[str, ...]:
        """The checkpoint's weights that should be quantised and that no block fits."""
        return self.checkpoint.unfit if isinstance(self.checkpoint, Requantised) else ()

    @property
    def weights_type(self) -> WeightsType:
        """The format that most of the products hold."""
        formats = Counter(format.name for format in self.held.formats.values()).most_common(1)
        return cast(WeightsType, formats[0][0]) if formats else self.style.dtype

    @property
    def block_size(self) -> int | None:
        """Columns that share a scale in products that are integers."""
        return BLOCK if self.weights_type in ("int8", "int4") else None

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

    layers: what `config` is a slice of; drafts: the MTP modules are wanted; draft_ids: tokens that
    drafts are chosen from, none: all; device: "meta" only to look at it. Raises CheckpointError.
    """
    check_tokenizer(source.folder, config)
    stored = open_slice(source.folder, layers)
    config = replace(stored.settle(config, drafts), draft_ids=draft_ids)
    checkpoint = see(stored, config, scheme)
    held = choose(checkpoint, config, style, ranks)
    model = make_model(config, style, held, ranks, device)
    with torch.device("meta"):
        every = family_of(config).make_model(config, ALONE)
    parameters = sum(p.numel() for p in every.parameters())
    return OpenedModel(
        *(source, ids, ranks, scheme, style, stored, config, checkpoint, held, model, parameters)
    )


def check_tokenizer(folder: Path, config: ModelConfig) -> None:
    path = folder / TOKENIZER
    if not path.is_file():
        return  # such an engine runs token ids only
    try:
        size = read_backend(path).get_vocab_size()
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if size > (limit := config.vocab_size):
        raise CheckpointError(f"{path}: {size} tokens, config.json has vocab_size {limit}")


def all_experts(config: ModelConfig, ranks: Ranks) -> list[Weight]:
    """The family's table with the routed experts of all ranks."""
    share = Share(Ranks(attention_dp=ranks.attention_dp))
    return family_of(config).weight_table(config, share)


def choose(checkpoint: Checkpoint, config: ModelConfig, style: WeightStyle, ranks: Ranks) -> Held:
    """Decide how weights are held: alike on all ranks, so that they have the same graphs."""
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
    if style.absorbed:
        formats |= dict.fromkeys(quantised_heads(own, formats), INT8)
    rows = plain_experts(own, formats) if style.expert_rows else set()
    return Held(formats, rows, joined)


def stored_formats(checkpoint: Checkpoint, weight: Weight) -> set[Format | None]:
    """The formats of what a weight is made of."""
    return {checkpoint.format(stored.name) for stored in weight.stored}


def fitting(checkpoint: Checkpoint, every: list[Weight], modules: Set[str]) -> set[str]:
    """Keep the MoE modules whose shared expert is in the same format as all their routed ones."""
    named = {weight.name: weight for weight in every}

    def formats(weight: str) -> set[str | None]:
        found = stored_formats(checkpoint, named[weight])
        return {None if format is None else format.name for format in found}

    def fits(module: str) -> bool:
        pairs = ((f"{module}.{leaf}", f"{module}.shared_experts.{leaf}") for leaf in STACKS)
        return all(formats(routed) == formats(shared) for routed, shared in pairs)

    return set(filter(fits, modules))


def can_stay(weight: Weight, share: Share) -> bool:
    """Tell if programs have an op for its format: ranks can't cut integers, nor small blocks."""
    if isinstance(weight.format, Integers):
        fits = weight.format.name == INT8.name if weight.looked_up else weight.joined is not None
        return fits and share.ranks.tp == 1
    return weight.joined is not None and weight.scale_group(share) >= GROUP


def in_pairs(own: list[Weight], formats: Mapping[str, Format]) -> dict[str, Format]:
    """Drop experts in integers whose other product is in another format: QMoE takes both."""
    stacks = {weight.name.rpartition(".")[0] for weight in own if weight.slices > 1}

    def stays(name: str, format: Format) -> bool:
        layer = name.rpartition(".")[0]
        if layer not in stacks or not isinstance(format, Integers):
            return True
        return all(formats.get(f"{layer}.{leaf}") is format for leaf in STACKS)

    return {name: format for name, format in formats.items() if stays(name, format)}


def quantised_heads(own: list[Weight], formats: Mapping[str, Format]) -> Iterator[str]:
    """Name the products by head that go to int8 because the products around them are integers.

    In fp32 the absorbed projections of a 10B model are a third of the bytes that a token reads.
    """
    for weight in own:
        beside = formats.get(f"{weight.name.rpartition('.')[0]}.o_proj")
        if weight.per_head and isinstance(beside, Integers):
            _, inputs, outputs = weight.slice_shape
            if INT8.fits((outputs, inputs)):
                yield weight.name


def plain_experts(own: list[Weight], formats: Mapping[str, Format]) -> set[str]:
    """Name the stacked weights of experts of which neither product stays in a format."""
    quantised = {name.rpartition(".")[0] for name in formats}
    stacked = (weight.name for weight in own if weight.slices > 1)
    return {name for name in stacked if name.rpartition(".")[0] not in quantised}


def make_model(
    config: ModelConfig, style: WeightStyle, held: Held, ranks: Ranks, device: str
) -> CausalLM:
    """The model with uninitialised weights: their memory is never touched."""
    family, share = family_of(config), Share(ranks)
    with torch.device(device):
        model = family.make_model(config, ranks)
        hold_in(model, FLOATS[style.dtype], style.for_gpu)
        join_shared(model, held.joined)
        hold(model, held.table(family.weight_table(config, share)), share)
        for name in held.by_outputs:
            put(model, name, ExpertRows(model.get_parameter(name)))
    return model


def join_shared(model: CausalLM, modules: Set[str]) -> None:
    """Make the shared expert of these modules the last one of their stack."""
    for name in modules:
        module = model.get_submodule(name)
        assert isinstance(module, GatheredMoE)
        module.join_shared()


def hold(model: CausalLM, table: Iterable[Weight], share: Share) -> None:
    """Make the model hold those weights of a rank's table that stay quantised."""
    for weight in table:
        if weight.format is not None:
            shape = model.get_parameter(weight.name).shape
            put(model, weight.name, holder(weight, shape, share))
