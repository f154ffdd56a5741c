"""A checkpoint's `config.json`, normalised once into the few values that shape the graph.

Each field of a configuration holds the function that reads it. The classes here have the fields
that several families share; a family adds its own in a subclass.
"""

import math
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self, TypeVar

from mtpbuild.runtime.checks import NEXTN_LIMIT
from mtpbuild.runtime.errors import CheckpointError

SIZE_LIMIT, COUNT_LIMIT = 1 << 24, 1 << 12  # of a dimension; of layers, modules or experts
T = TypeVar("T")


@dataclass(frozen=True)
class Reader:
    """Typed access to the values of a configuration; errors name the missing or invalid key.

    usual: what transformers' class takes for a key that is null or missing, where that is another
    value than the default of most families.
    """

    raw: Mapping[str, Any]
    usual: Mapping[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any, valid: Callable[[Any], bool], expected: str) -> Any:
        """Return the key's value, or the default if it is null or missing; raise unless `valid`."""
        value = self.raw.get(key)
        if value is not None and not valid(value):
            raise CheckpointError(f"{key} must be {expected}, not {reprlib.repr(value)}")
        return self.usual.get(key, default) if value is None else value

    def integer(
        self, key: str, least: int, default: int | None = None, most: int = SIZE_LIMIT
    ) -> int:
        def valid(value: Any) -> bool:
            return type(value) is int and least <= value <= most

        value = self.get(key, default, valid, f"an integer of {least}..{most}")
        if value is None:
            raise CheckpointError(f"{key} is missing")
        return value

    def number(self, key: str, default: float, above: float = -math.inf) -> float:
        """Read a finite number above the bound, or equal to the default."""

        def valid(value: Any) -> bool:
            real = type(value) in (int, float)
            return real and (value == default or above < value <= sys.float_info.max)

        bound = "" if above == -math.inf else f" above {above:g}"
        return float(self.get(key, default, valid, f"a number{bound}"))

    def flag(self, key: str, default: bool) -> bool:
        return self.get(key, default, lambda value: type(value) is bool, "true or false")

    def kinds(self, key: str, count: int) -> list[bool]:
        """Read a list of `count` layers, True for sparse ones; return [] if it is missing."""

        def valid(value: Any) -> bool:
            known = isinstance(value, list) and set(map(str, value)) <= {"dense", "sparse"}
            return known and len(value) == count

        expected = f"a list of {count} names, dense or sparse"
        return [kind == "sparse" for kind in self.get(key, [], valid, expected)]

    def rope(self) -> "Reader":
        """Return the rotary embedding's values; of both spellings the old one wins.

        transformers reads them so, and takes nothing of the other one.
        """
        raw = self.raw.get("rope_scaling") or self.raw.get("rope_parameters") or {}
        if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
            raise CheckpointError("rope_parameters (rope_scaling) must be a flat object or null")
        return Reader(raw)

    def only(self, **supported: Any) -> None:
        """Raise CheckpointError if a key is present with another value than the given one."""
        for key, value in supported.items():
            if self.raw.get(key) not in (None, value):
                value_here = f"{key} {self.raw[key]!r}"
                raise CheckpointError(f"{value_here} is not supported; supported: {value!r}")

    def fill(self, kind: type[T], /, **given: Any) -> T:
        """Construct a `kind` from the given fields; read the others by their declared readers."""
        rest = (each for each in fields(kind) if each.name not in given)  # type: ignore[arg-type]
        return kind(**given, **{each.name: each.metadata["read"](self, each.name) for each in rest})


def integer(least: int = 1, default: int | None = None, most: int = SIZE_LIMIT) -> Any:
    """Declare a field that reads an integer of least..most; without a default it is required."""
    read = {"read": lambda reader, key: reader.integer(key, least, default, most)}
    return field(metadata=read) if default is None else field(default=default, metadata=read)


def number(default: float, above: float = -math.inf) -> Any:
    read = {"read": lambda reader, key: reader.number(key, default, above)}
    return field(default=default, metadata=read)


def flag(default: bool) -> Any:
    return field(default=default, metadata={"read": lambda reader, key: reader.flag(key, default)})


ROPES = ("default", "linear", "yarn", "llama3", "proportional")


@dataclass(frozen=True)
class RopeConfig:
    """The parameters of a rotary embedding of one of `ROPES`."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = number(32.0, above=0)
    beta_slow: float = number(1.0, above=0)
    mscale: float = number(0.0, above=0)
    mscale_all_dim: float = number(0.0, above=0)
    attention_factor: float | None = None
    truncate: bool = flag(True)
    low_freq_factor: float = number(1.0, above=0)
    high_freq_factor: float = number(4.0, above=0)
    partial_rotary_factor: float = 1.0  # of kind `proportional`


LLAMA3 = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
)  # fmt: skip


def parse_rope(read: Reader, key: str = "rope") -> RopeConfig:
    """Read the rotary embedding in the old or the new spelling of `config.json`.

    The old spelling has rope_theta at the top level and the rest in rope_scaling. The new one has
    everything in rope_parameters.
    """
    rope = read.rope()
    kind = str(rope.raw.get("rope_type") or rope.raw.get("type") or "default")
    if kind not in ROPES:
        raise CheckpointError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPES)}")
    theta = rope if rope.raw.get("rope_theta") is not None else read
    limit = read.integer("max_position_embeddings", 1)
    above = kind == "yarn" and read.raw.get("original_max_position_embeddings") is not None
    source = read if above else rope  # as in transformers, where the key beside the object wins
    original = source.integer("original_max_position_embeddings", 1, default=limit)
    needed = {"linear": ("factor",), "llama3": LLAMA3}.get(kind, ())
    for name in needed:
        if rope.raw.get(name) is None:
            raise CheckpointError(f"{name} of rope type {kind!r} is missing")
    low, high = rope.number("low_freq_factor", 1.0, 0), rope.number("high_freq_factor", 4.0, 0)
    if kind == "llama3" and low >= high:
        raise CheckpointError(f"low_freq_factor {low:g} must be below high_freq_factor {high:g}")
    has_factor = rope.raw.get("attention_factor") is not None
    partial = rope.number("partial_rotary_factor", 1.0, above=0) if kind == "proportional" else 1.0
    return rope.fill(
        RopeConfig,
        theta=theta.number("rope_theta", 10000.0, above=1),
        kind=kind,
        factor=rope.number("factor", limit / original if kind == "yarn" else 1.0, above=0),
        original_max_position_embeddings=original,
        attention_factor=rope.number("attention_factor", 1.0, above=0) if has_factor else None,
        partial_rotary_factor=partial,
    )


def fixed(value: Any) -> Any:
    """Declare a field that is not in `config.json`: family or checkpoint's tensors set it."""
    return field(default=value, metadata={"read": lambda reader, key: value})


@dataclass(frozen=True)
class ModuleInputs:
    """Choices about the inputs of MTP modules, on which published engines disagree.

    Each family makes its own. The defaults follow DeepSeek-V3's report and transformers'
    `MtpModel`. SGLang, too, normalises hidden states of trunk and modules for DeepSeek and GLM.
    Without the norm, GLM-5's acceptance collapsed after draft 1 (vLLM PRs #46075, #47448).
    """

    hidden_first: bool = False  # the joined input is [hidden ; embedding], not [embedding ; hidden]
    trunk_normed: bool = True  # modules read the trunk's hidden state after its final norm
    recycles_normed: bool = True  # the next draft reads a module's hidden state after its norm
    shares_choice: bool = False  # later drafts attend to the rows chosen for the first one (DSA)


DEEPSEEK = ModuleInputs()
HEAD = "head"  # the prefix of a head's tensors, in place of a module's
MODULE_COUNT = "num_nextn_predict_layers"  # the key of most files for the number of modules


@dataclass(frozen=True)
class ModuleNames:
    """The names of MTP modules in a checkpoint, and of the weights that main layers don't have."""

    prefix: str = ""  # of a module, before its number; "": modules are layers after the trunk's
    own_prefix: str = ""  # of the weights below; "": the module's name
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    input_proj: str = "eh_proj"  # of a token's embedding and a hidden state
    head_norm: str = "shared_head.norm"
    count: str = MODULE_COUNT  # the key in `config.json`


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The values that the compiler needs of every model, under their names in `config.json`."""

    module_names: ClassVar[ModuleNames] = ModuleNames()
    # Whether norms are stored as their factor minus 1.
    norms_minus_one: ClassVar[bool] = False
    # What transformers' class takes for a value that config.json leaves out.
    usual: ClassVar[dict[str, Any]] = {}
    supported: ClassVar[dict[str, Any]] = {}  # the only value of a key that may be missing
    has_taps: ClassVar[bool] = True  # whether a head can read what enters its layers

    vocab_size: int = integer()
    hidden_size: int = integer()
    intermediate_size: int = integer()
    num_hidden_layers: int = integer(most=COUNT_LIMIT)
    num_nextn_predict_layers: int = integer(0, 0, COUNT_LIMIT)
    max_position_embeddings: int = integer()
    rms_norm_eps: float = number(1e-6, above=0)
    tie_word_embeddings: bool = flag(False)
    n_routed_experts: int = integer(0, 0, COUNT_LIMIT)
    rope: RopeConfig = field(metadata={"read": parse_rope})
    mtp: ModuleInputs = fixed(DEEPSEEK)  # noqa: RUF009 - it returns a field
    # Numbers of the MTP modules, from 0, whose stored embedding or head differs from the trunk's.
    own_embeddings: tuple[int, ...] = fixed(())
    own_heads: tuple[int, ...] = fixed(())
    draft_ids: tuple[int, ...] = fixed(())  # tokens that can be drafted; empty means all
    # The values of a head of another repository that drafts in place of the modules.
    head: "HeadConfig | None" = fixed(None)  # noqa: RUF009 - it returns a field
    # Names and shapes of the weights that a drafter of another package brings.
    drafter_weights: tuple[tuple[str, tuple[int, ...]], ...] = fixed(())

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        """Normalise a `config.json`; raise CheckpointError."""
        return cls.read(Reader(raw, cls.usual))

    @classmethod
    def read(cls, values: Reader) -> Self:
        values.only(**cls.supported)
        config = values.fill(cls)
        config.check()
        return config

    def check(self) -> None:
        """Raise CheckpointError unless the values fit together."""

    def sliced(self, first: int, count: int) -> Self:
        """Return the configuration of `count` main layers from `first` on; may raise UsageError."""
        return replace(self, num_hidden_layers=count)

    def is_moe(self, layer: int) -> bool:
        """Return whether a layer has routed experts; modules are layers after the trunk's."""
        return False

    @property
    def step_width(self) -> int:
        """The width of the hidden states that drafters read: the trunk's, and what a head adds."""
        return self.hidden_size + (self.head.added_width if self.head else 0)

    def find_key_rows(self, at: str) -> "KeyRows | None":
        """Return the keys that a layer's attention reads, if int8 rows of them are balanced.

        at: how the names of the layer's weights begin.
        """
        return None

    def name_module(self, j: int) -> str:
        """Return the name of MTP module j, from 0, in a checkpoint."""
        if self.head:
            return HEAD
        prefix = self.module_names.prefix
        return f"{prefix}{j}" if prefix else f"model.layers.{self.num_hidden_layers + j}"


@dataclass(frozen=True)
class KeyRows:
    """Keys in a cache, whose channels have one scale per head when they are int8.

    layer: how the names of the weights begin that make the keys. width: of a head. rotated: its
    first channels, in pairs (i, i + rotated / 2). queries: heads that read one head of keys.
    """

    layer: str
    width: int
    rotated: int
    queries: int
    has_norm: bool  # of each head of keys and of queries
    has_bias: bool


@dataclass(frozen=True, kw_only=True)
class HeadConfig(ModelConfig):
    """The values of a head that was trained for a published trunk, to draft in its steps."""

    title: ClassVar[str]  # in messages
    drafter: ClassVar[str]  # the name of the only one that can run it
    input_projs: ClassVar[tuple[str, ...]]  # weights that join or return hidden states
    heads: ClassVar[tuple[str, ...]] = ()  # weights over the vocabulary that may be quantised

    @property
    def added_width(self) -> int:
        """The numbers that the head adds to the trunk's hidden states."""
        return 0

    @property
    def cached_layers(self) -> int:
        """The layers that have cache rows, of a head whose drafter keeps any."""
        return 1

    @property
    def usual_nextn(self) -> int:
        """The drafts of a step if the build says no number."""
        return 1

    @property
    def most_drafts(self) -> int:
        """The drafts that it can make in a step."""
        return NEXTN_LIMIT

    @property
    def drafted(self) -> int:
        """The rows of the head's own vocabulary product."""
        return self.vocab_size

    def list_read_layers(self, trunk: ModelConfig) -> list[int]:
        """List the trunk's layer whose cache rows each of the head's reads; []: it has its own."""
        return []


@dataclass(frozen=True, kw_only=True)
class MoEConfig(ModelConfig):
    """The values of a model in which all or some layers have routed experts."""

    moe_intermediate_size: int = integer(1, 1)
    n_shared_experts: int = integer(0, 0)
    num_experts_per_tok: int = integer(1, 1)
    n_group: int = integer(1, 1)
    topk_group: int = integer(1, 1)
    routed_scaling_factor: float = number(1.0)
    norm_topk_prob: bool = flag(True)
    moe_layers: tuple[bool, ...] = field(metadata={"read": lambda read, key: moe_layers(read)})
    # Experts are scored by a softmax, and no bias is added to select them.
    softmax_router: bool = fixed(False)

    def is_moe(self, layer: int) -> bool:
        return self.n_routed_experts > 0 and self.moe_layers[layer]

    def sliced(self, first: int, count: int) -> Self:
        modules = self.moe_layers[self.num_hidden_layers :]
        kept = (*self.moe_layers[first : first + count], *modules)
        return replace(super().sliced(first, count), moe_layers=kept)

    def check(self) -> None:
        super().check()
        if not self.n_routed_experts:
            return
        size, rest = divmod(self.n_routed_experts, self.n_group)
        if rest or size < 2:
            raise CheckpointError(
                f"n_routed_experts {self.n_routed_experts} must split into n_group {self.n_group} "
                "groups of at least 2"
            )
        if self.topk_group > self.n_group:
            raise CheckpointError(f"topk_group {self.topk_group} exceeds n_group {self.n_group}")
        if self.num_experts_per_tok > self.topk_group * size:
            raise CheckpointError(
                f"num_experts_per_tok {self.num_experts_per_tok} exceeds the "
                f"{self.topk_group * size} experts of topk_group {self.topk_group} groups"
            )


def moe_layers(read: Reader) -> tuple[bool, ...]:
    """Read which layers have routed experts: the trunk's layers, then the MTP modules.

    `first_k_dense_replace` and `moe_layer_freq` decide by a layer's number; modules count on from
    the trunk's last layer. Where given, `mlp_layer_types` decides for the trunk instead, and
    `mtp_mlp_layer_types` for the modules.
    """
    first = read.integer("first_k_dense_replace", 0, 0)
    every = read.integer("moe_layer_freq", 1, 1)
    layers = read.integer("num_hidden_layers", 1, most=COUNT_LIMIT)
    modules = read.integer(MODULE_COUNT, 0, 0, COUNT_LIMIT)
    by_number = [i >= first and i % every == 0 for i in range(layers + modules)]
    trunk = read.kinds("mlp_layer_types", layers) or by_number[:layers]
    return (*trunk, *(read.kinds("mtp_mlp_layer_types", modules) or by_number[layers:]))
