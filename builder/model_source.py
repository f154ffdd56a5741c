"""A checkpoint that was checked and the model that it makes: what there is to compile."""

import logging
import typing
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from mtpbuild.builder.checkpoint.generation import GenerationIds
from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.checkpoint.tensors import Checkpoint, open_slice
from mtpbuild.builder.models import Family, ModelConfig, family_of
from mtpbuild.builder.models.common.blocks import put
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.moe import ExpertRows, GatheredMoE
from mtpbuild.builder.models.common.precision import FLOATS, hold_in
from mtpbuild.builder.models.common.weights import (
    STACKS,
    Share,
    Weight,
    by_outputs,
    like_routed,
    with_shared,
)
from mtpbuild.builder.plan import Plan
from mtpbuild.builder.program.programs import Program, make_programs
from mtpbuild.builder.quantize.kept import (
    Kept,
    can_stay,
    in_pairs,
    kept_heads,
    plain_experts,
)
from mtpbuild.builder.quantize.requantised import Requantised, see
from mtpbuild.builder.quantize.scheme import Scheme
from mtpbuild.plugins.matmul_nbits.op import BLOCK
from mtpbuild.runtime.contract.manifest import FloatType, ModelInfo, WeightsType
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.ranks import ALONE, Ranks
from mtpbuild.runtime.tokenizer import TOKENIZER, read_backend


@dataclass
class ModelSource:
    """A checked checkpoint. Its weights go to disk one by one; graphs are traced without them."""

    name: str
    folder: Path
    config: ModelConfig
    ids: GenerationIds
    device: str = "cpu"  # meta: only to look at
    formats: tuple[str, ...] = ()  # that the target runs as they are
    layers: LayersSlice | None = None  # `config` is then the slice's
    ranks: Ranks = ALONE  # of which the model is one's part, the same for all
    dtype: FloatType = "float32"
    drafts: bool = True  # its MTP modules are wanted
    draft_ids: tuple[int, ...] = ()  # tokens that drafts are chosen from; none: all
    absorbed: bool = False  # attention never expands its cache: it reads projections by head alone
    scheme: Scheme | None = None  # by which weights are quantised anew; None: they are as stored
    expert_rows: bool = False  # plain experts are stored by outputs, for the op of the CPU's graphs
    join_shared: bool = False  # shared experts stand behind the routed ones where they fit there
    for_gpu: bool = False  # in bfloat16 the head is too
    family: Family = field(init=False)
    stored: Checkpoint = field(init=False)
    checkpoint: Checkpoint = field(init=False)  # the same, or as the scheme quantises it
    table: list[Weight] = field(init=False)  # with all ranks' experts
    model: CausalLM = field(init=False)
    parameters: int = field(init=False)  # of all ranks
    kept: dict[str, Kept] = field(init=False)  # by weight, what stays in them
    by_outputs: set[str] = field(init=False)  # weights that `expert_rows` is about
    joined: set[str] = field(init=False)  # MoE modules that `join_shared` is about

    def __post_init__(self) -> None:
        self._check_tokenizer()
        self.family = family_of(self.config)
        self.stored = open_slice(self.folder, self.layers)
        settled = self.stored.settle(self.config, self.drafts)
        self.config = replace(settled, draft_ids=self.draft_ids)
        self.checkpoint = see(self.stored, self.config, self.scheme)
        with torch.device(self.device):
            # Uninitialised: its memory is never touched.
            self.model = self.family.make_model(self.config, self.ranks)
        with torch.device("meta"):
            all_ranks = self.family.make_model(self.config, ALONE)
        self.parameters = sum(p.numel() for p in all_ranks.parameters())
        hold_in(self.model, FLOATS[self.dtype], self.for_gpu)
        experts_of_all = Ranks(attention_dp=self.ranks.attention_dp)
        self.table = self.family.weight_table(self.config, Share(experts_of_all))
        own = self.family.weight_table(self.config, Share(self.ranks))
        self.joined = self._joined(own) if self.join_shared else set()
        self.table, own = (with_shared(table, self.joined) for table in (self.table, own))
        self.kept = in_pairs(dict(self._keep(own)))
        if self.absorbed:
            self.kept |= {heads.weight.name: heads for heads in kept_heads(own, self.kept)}
        self.by_outputs = plain_experts(own, self.kept) if self.expert_rows else set()
        with torch.device(self.device):
            join_shared(self.model, self.joined)
            for name, kept in self.kept.items():
                put(self.model, name, kept.module(self.model.get_parameter(name).shape))
            for name in self.by_outputs:
                put(self.model, name, ExpertRows(self.model.get_parameter(name)))

    def weight_table(self, rank: int = 0) -> list[Weight]:
        """What a rank's weights are made of, in the order of use."""
        table = self.family.weight_table(self.config, Share(self.ranks, rank))
        table = with_shared(table, self.joined)
        return [by_outputs(w) if w.name in self.by_outputs else w for w in table]

    def _keep(self, own: list[Weight]) -> Iterator[tuple[str, Kept]]:
        for every, weight in zip(self.table, own, strict=True):
            # Of all ranks' experts: a product stays in a format that all its sources are in.
            format, *others = {self.checkpoint.format(source.name) for source in every.sources}
            if format is not None and format.name in self.formats and not others:
                kept = Kept(weight, format, Share(self.ranks))
                if can_stay(kept):
                    yield weight.name, kept

    def _joined(self, own: list[Weight]) -> set[str]:
        """The modules whose shared expert is in the format of all their routed ones."""

        def formats(module: str, stack: str) -> set[str | None]:
            (weight,) = (w for w in self.table if w.name == f"{module}.{stack}")
            found = (self.checkpoint.format(source.name) for source in weight.sources)
            return {None if format is None else format.name for format in found}

        return {
            module
            for module in like_routed(own, Share(self.ranks))
            if all(formats(module, s) == formats(f"{module}.shared_experts", s) for s in STACKS)
        }

    def _check_tokenizer(self) -> None:
        path = self.folder / TOKENIZER
        if not path.is_file():
            return  # such an engine runs token ids only
        try:
            size = read_backend(path).get_vocab_size()
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        if size > (limit := self.config.vocab_size):
            raise CheckpointError(f"{path}: {size} tokens, config.json has vocab_size {limit}")

    def dequantised(self) -> Counter[str]:
        """Count the weights that become larger than they were, by format."""
        sources = {s.name for w in self.table if w.name not in self.kept for s in w.sources}
        formats = (self.checkpoint.format(name) for name in sources)
        return Counter(format.name for format in formats if format is not None)

    def tell_copies(self) -> None:
        """Note in the log which MTP modules have an embedding or a head of their own."""
        own = {"embedding": self.config.own_embeddings, "head": self.config.own_heads}
        for what, modules in own.items():
            if modules:
                names = ", ".join(self.family.module_name(self.config, j) for j in modules)
                note = "note: the %s stored in %s differs from the trunk's: drafts use it"
                logging.getLogger(__name__).warning(note, what, names)

    def tell_formats(self) -> None:
        """Note it in the log if any weights are dequantised, or can't be quantised as asked."""
        log = logging.getLogger(__name__)
        counts = sorted(self.dequantised().items())
        if found := ", ".join(f"{count} in {name}" for name, count in counts):
            note = "note: quantised weights (%s) are dequantised: the engine holds them in %s"
            log.warning(note, found, self.dtype)
        if unfit := self.unfit:
            note = "note: %d weights stay in %s: their columns do not split into blocks (%s, ..)"
            log.warning(note, len(unfit), self.dtype, unfit[0])

    @property
    def unfit(self) -> tuple[str, ...]:
        """The checkpoint's weights that should be quantised and that no block fits."""
        return self.checkpoint.unfit if isinstance(self.checkpoint, Requantised) else ()

    @property
    def weights_type(self) -> WeightsType:
        """The format that most of the products hold."""
        formats = Counter(kept.format.name for kept in self.kept.values()).most_common(1)
        return typing.cast(WeightsType, formats[0][0]) if formats else self.dtype

    @property
    def block_size(self) -> int | None:
        """Columns that share a scale in products that are integers."""
        return BLOCK if self.weights_type in ("int8", "int4") else None

    def programs(self, plan: Plan) -> tuple[Program, ...]:
        return make_programs(plan, self.model)

    def info(self) -> ModelInfo:
        config = {n: v for n, v in vars(self.config).items() if n in ModelInfo.model_fields}
        return ModelInfo(
            name=self.name,
            architecture=self.family.name,
            parameters=self.parameters,
            **config,
            **vars(self.ids),
        )


def join_shared(model: CausalLM, modules: set[str]) -> None:
    """Make the shared expert of these modules the last one of their stack."""
    for name in modules:
        module = model.get_submodule(name)
        assert isinstance(module, GatheredMoE)
        module.join_shared()
