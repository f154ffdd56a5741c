"""Make the programs of an engine from its plan: modules, state and example inputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain

import torch
from torch import Tensor, nn

from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.plan.plan import (
    Plan,
    make_drafter_states,
    make_state_specs,
    name_drafter_rows,
)
from mtpbuild.builder.program.accept import (
    MIXED_OUTPUTS,
    OUTPUTS,
    KernelAcceptance,
    MixedAcceptance,
)
from mtpbuild.builder.program.draft import CheckedDrafter
from mtpbuild.builder.program.step import (
    FillDrafterProgram,
    MixedStepProgram,
    PrefillProgram,
    ScoreProgram,
    StepProgram,
)
from mtpbuild.runtime.contract.controls import (
    CONSTRAINTS,
    CONTROLS,
    CORE_CONTROLS,
    HISTORY,
    Control,
    list_control_shapes,
)
from mtpbuild.runtime.contract.drafters import find_drafter
from mtpbuild.runtime.contract.programs import (
    FILL_DRAFTER,
    HIDDEN,
    MIXED,
    PLAIN,
    PREFILL,
    SCORE,
    Scores,
    name_program,
)
from mtpbuild.runtime.contract.rules import find_rule

EXAMPLE_CHUNK, EXAMPLE_BATCH = 7, 17  # arbitrary, but no other dimension has these sizes


@dataclass(frozen=True)
class Program:
    """A graph to trace: its module, its states, and example arguments."""

    name: str
    module: nn.Module
    state: tuple[str, ...]
    arguments: dict[str, Tensor]
    results: tuple[str, ...] = ()  # names of the outputs after the new state
    batch: int = 1  # slots of the example
    whole: bool = False  # takes all rows of the caches, not just those in use

    @property
    def outputs(self) -> tuple[str, ...]:
        return (*(f"{name}.out" for name in self.state), *self.results)


def max_chunk_tokens(plan: Plan) -> int:
    """Return the largest number of tokens that the traced chunk of a prompt may have."""
    return max(plan.prefill_chunk, EXAMPLE_CHUNK)


def make_drafter(plan: Plan, nextn: int) -> CheckedDrafter | None:
    """Return the plan's drafter for steps of nextn drafts; None if the plan does not draft.

    While it is traced, it raises BuildError for states that its record does not declare.
    """
    if plan.drafter is None:
        return None
    record = find_drafter(plan.drafter)
    rows, states = name_drafter_rows(plan), make_drafter_states(plan)
    return CheckedDrafter(record.name, record.make(nextn), nextn, rows, states)


# States that only steps and the host use; prefill fills all others.
STEP_STATES = {"lengths", "window", "num_drafts", "thinking", "draft_probs", HISTORY}
SCORES = tuple(field.name for field in fields(Scores))


def make_programs(plan: Plan, model: CausalLM) -> tuple[Program, ...]:
    """Make prefill (one slot), decode (all slots, greedy) and decode_mixed (all slots, any mode).

    If prompts may have log-probabilities, there is also score, a prefill that reports them. An
    adaptive engine has decode and decode_mixed for each number of drafts up to nextn. Its steps
    without drafts leave the drafter out; fill_drafter fills in what the drafter has missed.
    """
    style = plan.style
    B = plan.max_batch if style.all_slots or plan.max_batch == 1 else EXAMPLE_BATCH
    state = tuple(spec.name for spec in make_state_specs(plan))
    counts = range(plan.nextn + 1) if plan.adaptive else (plan.nextn,)
    steps = (_make_step_programs(plan, model, state, nextn, B) for nextn in counts)
    return *_prefill(plan, model, state), *chain.from_iterable(steps)


def _prefill(plan: Plan, model: CausalLM, state: tuple[str, ...]) -> Iterator[Program]:
    filled = tuple(name for name in state if name not in STEP_STATES)
    inputs = {"tokens": _make_ints(1, EXAMPLE_CHUNK), "start": _make_ints(1)}
    ahead = {"ahead": _make_ints(1, plan.lookahead)} if plan.lookahead else {}
    style = plan.style
    whole = plan.style.all_slots
    drafter = make_drafter(plan, plan.nextn)
    expand = style.pipeline.expands_prompts
    prefill = PrefillProgram(model, drafter, expand).eval()
    yield Program(PREFILL, prefill, filled, inputs | ahead, whole=whole)
    if plan.adaptive and drafter is not None and ahead:
        shape, dtype = (1, EXAMPLE_CHUNK, plan.config.step_width), getattr(torch, plan.dtype)
        missed = tuple(name for name in filled if name in drafter.names)
        fill = FillDrafterProgram(model, drafter, expand).eval()
        arguments = inputs | ahead | {HIDDEN: torch.zeros(shape, dtype=dtype)}
        yield Program(FILL_DRAFTER, fill, missed, arguments, whole=whole)
    if plan.score:
        inputs |= {"following": _make_ints(1, EXAMPLE_CHUNK)} | ahead
        score = ScoreProgram(model, drafter, expand).eval()
        yield Program(SCORE, score, filled, inputs, SCORES, whole=whole)


def _make_step_programs(
    plan: Plan, model: CausalLM, state: tuple[str, ...], nextn: int, B: int
) -> Iterator[Program]:
    """Yield the two programs of a step that makes nextn drafts; B is the batch of the example."""
    style = plan.style
    drafter = make_drafter(plan, nextn)
    active = {"active": torch.ones(B, dtype=torch.bool)}
    for_host: tuple[str, ...] = ()  # what the host keeps for `fill_drafter`
    if drafter is not None and not nextn:
        state = tuple(name for name in state if name not in {"draft_probs", *drafter.names})
        drafter = None
        for_host = (HIDDEN,) if plan.lookahead else ()
    acceptance = KernelAcceptance if style.accepts_by_kernel else MixedAcceptance
    step = StepProgram(model, drafter, nextn)
    rules = tuple(map(find_rule, plan.rules))
    table = CONTROLS if style.penalties else CORE_CONTROLS
    table += tuple(control for rule in rules for control in rule.controls)
    masks = CONSTRAINTS if plan.constrained else ()
    mixed = MixedStepProgram(model, drafter, nextn, acceptance, table, masks, rules)
    controls = _make_example_controls(plan, (*table, *masks), B)
    for kind, module, inputs, outputs in (
        (PLAIN, step, active, OUTPUTS),
        (MIXED, mixed, active | controls, MIXED_OUTPUTS),
    ):
        module.for_host = for_host
        yield Program(
            name_program(kind, nextn, plan.nextn),
            module.eval(),
            state,
            inputs,
            (*outputs, *for_host),
            B,
            style.whole_caches,
        )


def _make_example_controls(plan: Plan, table: Sequence[Control], B: int) -> dict[str, Tensor]:
    """Return example values [B, ..] of the controls in the table, in its order."""
    shapes = list_control_shapes(plan.nextn, plan.positions, plan.config.vocab_size, table)
    return {c.name: torch.zeros((B, *shapes[c.name]), dtype=getattr(torch, c.dtype)) for c in table}


def _make_ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)
