"""The plan of one engine, made from the request and the configuration, without torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.models import find_family_of
from mtpbuild.builder.weights.scheme import FLOATS, Scheme
from mtpbuild.runtime.checks import NEXTN_LIMIT
from mtpbuild.runtime.contract.controls import CONSTRAINTS, CONTROLS, HISTORY
from mtpbuild.runtime.contract.drafters import ASSISTANT, BLOCK_HEAD, EAGLE, VANILLA, find_drafter
from mtpbuild.runtime.contract.manifest import FloatType
from mtpbuild.runtime.contract.programs import HIDDEN
from mtpbuild.runtime.contract.state import (
    BLOCK,
    StateSpec,
    make_rows_spec,
    name_layer_rows,
    name_layer_state,
    name_module_rows,
    step_spec,
)
from mtpbuild.runtime.errors import BuildError, UsageError
from mtpbuild.runtime.ranks import Ranks

Nextn = int | Literal["auto"]  # as given on the command line
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "int64": 8, "bool": 1}
ADAPTIVE_NEXTN = 5  # most drafts of a step where nextn is "auto"
DrafterName = str  # of a registered drafter (`find_drafter`)
# Inputs of programs besides state and controls.
INPUTS = ("active", "tokens", "start", "ahead", "following", HIDDEN)
INT8_BLOCK = 32  # numbers of a cache row in int8 that share a scale in fp16
ALIGNED_ROWS = 64  # of 4 bytes: every slot of a fixed cache begins at a multiple of 256 bytes


@dataclass(frozen=True)
class Plan:
    """The parameters of one engine's graphs."""

    config: ModelConfig
    nextn: int
    drafter: DrafterName | None
    max_batch: int
    max_seq_len: int
    prefill_chunk: int
    style: GraphStyle = field(default_factory=GraphStyle)
    ranks: Ranks = field(default_factory=Ranks)
    compute_capabilities: tuple[str, ...] = ()  # of the GPUs to compile for; empty: a CPU
    adaptive: bool = False  # nextn is a maximum: the runtime chooses the number for each step
    scheme: Scheme | None = None  # by which the build quantises weights, if it does
    rules: tuple[str, ...] = ()  # acceptance rules of other packages
    score: bool = False  # whether prompts may have log-probabilities
    draft_ids: tuple[int, ...] = ()  # tokens that drafts are chosen from; empty: all

    @property
    def dtype(self) -> FloatType:
        return self.style.dtype

    @property
    def quantised_to(self) -> str | None:
        """The value of --weights; None if it was not given."""
        return None if self.scheme is None else self.scheme.main or FLOATS

    @property
    def head_weights(self) -> str | None:
        """The format that the build quantises embedding and head to; None if it does not."""
        return None if self.scheme is None else self.scheme.head

    @property
    def weight_bits(self) -> float | None:
        """The bits that int4 weights may take on average; None: what they take by themselves."""
        return None if self.scheme is None else self.scheme.bits

    @property
    def calibrated(self) -> str | None:
        """The text that int4 weights are calibrated with; None if they are not."""
        return None if self.scheme is None else self.scheme.calibration

    @property
    def draft_vocab(self) -> int | None:
        return len(self.draft_ids) or None

    @property
    def window(self) -> int:
        """T, the number of tokens in a step's window: the newest and nextn drafts."""
        return self.nextn + 1

    @property
    def capacity(self) -> int:
        """S, the number of cache rows per slot.

        A live slot's window starts below max_seq_len and takes T rows. Where steps overlap, a slot
        whose request ended in the last step runs once more, T rows further on.
        """
        rows = self.max_seq_len + self.window * (2 if self.style.overlap else 1)
        step = find_family_of(self.config).row_step(self.config)
        if step > 1:  # torch.export takes a size that is always 1 for one that never varies
            rows = max(rows, 4 * step)
        step = math.lcm(step, ALIGNED_ROWS if self.style.whole_caches else 1)
        return -(-rows // step) * step

    def count_rows(self, window: int) -> int:
        """Return the cache rows per slot of a layer that sees so many; 0: all."""
        if not window:
            return self.capacity
        return count_ring_rows(window, self.prefill_chunk, self.window, self.capacity)

    @property
    def constrained(self) -> bool:
        """Whether steps take masks of the tokens that a grammar allows.

        The host writes masks between two steps, after it has read the window. Programs for a GPU
        take none, since their kernels and CUDA graphs can't read them; nor do several ranks.
        """
        return not self.style.for_gpu and self.ranks.tp == 1

    @property
    def positions(self) -> int:
        """The number of positions per slot, of tokens, drafts and the numbers that draw them."""
        return self.capacity + self.window

    @property
    def lookahead(self) -> int:
        """The number of tokens after a chunk that the drafter reads: module k reads t_{p+k}."""
        return 0 if self.drafter is None else find_drafter(self.drafter).lookahead(self.nextn)


def count_ring_rows(window: int, chunk: int, step: int, capacity: int) -> int:
    """Return the rows of a ring for a layer that sees `window` of a request's `capacity` rows.

    There are as many more as may be written before the oldest is read: a chunk, or the steps in
    flight, and blocks of the prefix cache that are saved after that.
    """
    needed = max(window + 1, 2 * BLOCK) + max(chunk, BLOCK) + 2 * step
    return -(-min(needed, capacity) // BLOCK) * BLOCK


def sort_nextns(nextns: Iterable[Nextn]) -> tuple[Nextn, ...]:
    """Return each value once: numbers in rising order, then "auto"."""
    return tuple(sorted(set(nextns), key=lambda nextn: (nextn == "auto", nextn)))


def count_drafts(config: ModelConfig, nextn: Nextn) -> int:
    """Return the most drafts of a step."""
    max_drafts = config.head.most_drafts if config.head else ADAPTIVE_NEXTN
    return min(ADAPTIVE_NEXTN, max_drafts) if nextn == "auto" else nextn


def choose_drafter(
    config: ModelConfig, nextn: Nextn, asked: DrafterName | None
) -> DrafterName | None:
    """Return the drafter asked for; by default vanilla if each draft has a module, else Eagle.

    Raises UsageError or BuildError if the checkpoint lacks modules for it.
    """
    modules = config.num_nextn_predict_layers
    if nextn == "auto":
        if asked is not None and not find_drafter(asked).adaptive:
            raise UsageError(
                f"--nextn auto drafts by {EAGLE}: each step of {asked} makes the same number of "
                "drafts"
            )
        asked = asked or (config.head.drafter if config.head else EAGLE)
    nextn = count_drafts(config, nextn)
    if not 0 <= nextn <= NEXTN_LIMIT:
        raise UsageError(f"--nextn {nextn} is outside 0..{NEXTN_LIMIT}")
    if nextn == 0:
        return None
    if head := config.head:
        if asked in (EAGLE, VANILLA, ASSISTANT, BLOCK_HEAD) and asked != head.drafter:
            raise UsageError(f"--drafter {asked}: {head.title} drafts by {head.drafter}")
        chosen = asked or head.drafter
        if chosen == head.drafter and nextn > head.most_drafts:
            raise UsageError(
                f"--nextn {nextn}: a block of this head has at most {head.most_drafts} drafts"
            )
    else:
        chosen = asked or (VANILLA if modules >= nextn else EAGLE)
        if chosen == ASSISTANT:
            raise UsageError(f"--drafter {ASSISTANT}: join Gemma-4's assistant with --mtp")
        if chosen == BLOCK_HEAD:
            raise UsageError(f"--drafter {BLOCK_HEAD}: join a DFlash or DSpark head with --mtp")
    needed = count_modules_in_use(chosen, nextn)
    if needed and not modules:
        raise BuildError(
            f"--nextn {nextn} needs an MTP module; this checkpoint has none "
            "(num_nextn_predict_layers 0): build --nextn 0, join a head with --mtp, or make one by "
            "`mtpbuild tune-head --new`"
        )
    if needed > modules:
        raise UsageError(
            f"--drafter {chosen} needs {needed} MTP modules for --nextn {nextn}, "
            f"the checkpoint has {modules}: use --drafter {EAGLE}"
        )
    return chosen


def count_modules_in_use(drafter: DrafterName | None, nextn: int) -> int:
    """Return how many MTP modules a drafter runs; Eagle runs the first one again and again."""
    return 0 if drafter is None else find_drafter(drafter).modules(nextn)


def count_cached_layers(config: ModelConfig, drafter: DrafterName | None, nextn: int) -> int:
    """Return how many layers of modules, or of a head, have cache rows."""
    layers = config.head.cached_layers if config.head else 1
    return count_modules_in_use(drafter, nextn) * layers


def name_drafter_rows(plan: Plan) -> list[str]:
    """Return the names of the cache rows that the drafter's modules keep."""
    count = count_cached_layers(plan.config, plan.drafter, plan.nextn)
    return [name_module_rows(j) for j in range(count)]


def make_state_specs(plan: Plan) -> tuple[StateSpec, ...]:
    """Return the specs of an engine's states, in the order of the programs' inputs."""
    c, B, T, K = plan.config, plan.max_batch, plan.window, plan.nextn
    family, L = find_family_of(c), c.num_hidden_layers
    owners = [(name_layer_rows(i), f"layers.{i}") for i in range(L)]
    owners += [(name, f"mtp.{j}") for j, name in enumerate(name_drafter_rows(plan))]
    rows, dtype = family.list_rows(c, plan.ranks), plan.style.cache_dtype or plan.dtype
    widths = [count_int8_width(*row) if dtype == "int8" else row[0] for row in rows]
    windows = [*family.windows(c), *[0] * len(owners)]
    specs = [
        make_rows_spec(name, owner, dtype, (B, 1, plan.count_rows(window), width), ring=window > 0)
        for (name, owner), width, window in zip(owners, widths, windows, strict=False)
        if width  # there are widths of modules that are not used
    ]
    for more in family.more_rows(c):
        shape = (B, 1, plan.count_rows(more.window), more.width)
        name, owner = name_layer_state(more.name, more.layer), f"layers.{more.layer}"
        specs.append(make_rows_spec(name, owner, dtype, shape, ring=more.window > 0))
    specs += [state.spec(B) for state in family.recurrent(c, plan.ranks)]
    specs += [
        step_spec("lengths", "int64", (B,)),
        step_spec("window", "int64", (B, T)),
        step_spec("num_drafts", "int64", (B,)),
        step_spec("thinking", "bool", (B,)),
    ]
    if plan.style.penalties:
        specs.append(step_spec(HISTORY, "int64", (B, plan.positions)))
    if K:
        specs.append(step_spec("draft_probs", "float32", (B, K, c.vocab_size)))
    return (*specs, *make_drafter_states(plan, {spec.name for spec in specs}))


def check_cache_rows(config: ModelConfig, dtype: str) -> None:
    """Raise UsageError for int8 caches of a model whose rows can't be int8."""
    family = find_family_of(config)
    if dtype == "int8" and not family.cache_sections(config, 0):
        raise UsageError(
            f"--cache-dtype int8: {family.name} has cache rows that can't be int8: use bfloat16"
        )


def count_int8_width(width: int, sections: Iterable[int]) -> int:
    """Return the bytes of a cache row in int8; its sections are repeated up to the width."""
    sizes = [*sections] or [1]
    blocks = sum(-(-size // INT8_BLOCK) for size in sizes)
    return width + 2 * blocks * width // sum(sizes)


def make_drafter_states(plan: Plan, others: Iterable[str] = ()) -> tuple[StateSpec, ...]:
    """Return the states that the drafter carries besides the rows of its modules.

    others: the names of the engine's other states. Raises BuildError for a state that is no carry
    with the batch first, or whose name is taken, and for a drafter with modules or states but no
    lookahead.
    """
    if plan.drafter is None:
        return ()
    record = find_drafter(plan.drafter)
    states, batch = tuple(record.states(plan)), ("batch", plan.max_batch)
    taken = {*others, *INPUTS, *(control.name for control in (*CONTROLS, *CONSTRAINTS))}
    for spec in states:
        if spec.role != "carry" or next(iter(spec.sizes.items()), None) != batch:
            raise BuildError(
                f"drafter {record.name}: state {spec.name} must be a carry whose first size is "
                f"batch, here {plan.max_batch}"
            )
        if spec.name in taken:
            raise BuildError(f"drafter {record.name}: another input is called {spec.name}")
        taken.add(spec.name)
    if not plan.lookahead and (states or record.modules(plan.nextn)):
        raise BuildError(f"drafter {record.name}: with modules or states it needs a lookahead of 1")
    if plan.adaptive and (states or plan.lookahead > 1):
        raise BuildError(
            f"drafter {record.name}: --nextn auto needs a lookahead of 1, and no states"
        )
    return states


def count_state_bytes(spec: StateSpec) -> int:
    """Return the bytes of a state tensor."""
    return ITEM_BYTES[spec.dtype] * math.prod(spec.shape)
