"""Section `slice`: times R1's step part by part against its bounds, and sums the parts.

There is no other rank here, so no figure includes all-reduces or the gathering of logits.
"""

import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mtpbuild.builder.checkpoint.config import MoEConfig
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.targets import load_target
from on_gpu.machine import Machine, Row, difference, microseconds
from on_gpu.parts import (
    MTP_CACHE,
    Accept,
    DraftHead,
    FirstDraft,
    FurtherDraft,
    Head,
    Layer,
    Part,
    State,
)
from on_gpu.slice_bench import Bench, Eagerly
from on_gpu.slice_step import own_step
from on_gpu.slices import Slice

SETS = 4  # sets of operands: different tokens choose different experts


def r1_slice(
    case: Slice, machine: Machine, compiled: bool, programs: Path | None = None
) -> Iterator[Row]:
    """Yield rows of the parts, of the whole model's steps (their sums), and of the slice.

    programs: the folder in which compiled programs stay for the next run; None: none is kept.
    """
    sharing = load_target("inductor").compiling() if compiled else nullcontext()
    with tempfile.TemporaryDirectory() as scratch, sharing:
        bench = Bench(case, machine, compiled, programs or Path(scratch))
        found: dict[tuple[str, int], Row] = {}
        for part in needed(bench):
            found[part.name, part.tokens] = row = timed(bench, part)
            yield row
        for nextn in case.nextn:
            yield whole_step(bench, nextn, found)
        yield from own_step(bench)


def needed(bench: Bench) -> Iterator[Part]:
    parts, config = bench.parts, bench.case.config
    assert isinstance(config, MoEConfig)
    for nextn in bench.case.nextn:
        T = nextn + 1
        yield parts.layer("dense layer", 0, T)
        yield parts.layer("MoE layer", config.moe_layers.index(True), T)
        yield parts.head(T)
        yield parts.acceptance(T)
        if nextn:
            yield parts.first_draft(T)
    if bench.most:
        yield parts.draft_head()
        yield parts.further_draft(bench.state(bench.most)[MTP_CACHE])


def counts(case: Slice, nextn: int) -> dict[tuple[str, int], int]:
    """Map (name, tokens) of each part to the number of its runs in a step of the whole model."""
    T = nextn + 1
    verifying = {
        ("dense layer", T): case.dense,
        ("MoE layer", T): case.moe,
        ("head", T): 1,
        ("acceptance", T): 1,
    }
    drafting = {("first draft", T): 1, ("head of a draft", 1): nextn}
    if nextn > 1:
        drafting["further draft", 1] = nextn - 1
    return verifying | drafting if nextn else verifying


def timed(bench: Bench, part: Part) -> Row:
    """Time a part, and compare it with eager.

    The error is the median token's difference over the largest value, not the worst token's: where
    two experts have the same score, either may be chosen.
    """
    program, runner = part.program, bench.runner(part.program)
    state = bench.state(bench.most)
    caches = [state[name] for name in program.state]
    given = list(program.arguments.values())
    sets = [[*caches, *given], *([*caches, *map(other, given)] for _ in range(SETS - 1))]
    eager, errors = Eagerly(program), list[float]()
    for operands in sets:
        wanted = [x.clone() for x in eager.run(operands)]
        for a, b in zip(wanted, runner.run(operands), strict=True):
            if a.is_floating_point():
                errors += token_errors(a.float(), b.float())
    row = Row(f"R1 {part.name}", f"T {part.tokens} S {bench.case.context}", 0.0)
    row.error = float(torch.tensor(errors).median()) if errors else 0.0
    if bench.machine.bandwidth:
        row.microseconds = microseconds([partial(runner.run, operands) for operands in sets])
        row.bound = part.cost.bound(bench.machine)
    return row


def other(operand: Tensor) -> Tensor:
    """Return new random values for a float operand; caches and integers stay."""
    cache = operand.dim() == 4
    return torch.randn_like(operand) if operand.is_floating_point() and not cache else operand


def token_errors(wanted: Tensor, got: Tensor) -> list[float]:
    """Return the largest error of each row [.., values] over the largest wanted value."""
    error = (got - wanted).abs().flatten(0, -2).amax(-1)
    return (error / wanted.abs().max()).tolist()


def whole_step(bench: Bench, nextn: int, found: dict[tuple[str, int], Row]) -> Row:
    """Sum the parts' times; the error compares the slice's step made of parts with the program."""
    case = bench.case
    row = Row(
        f"R1 {case.dense + case.moe} layers",
        f"nextn {nextn} S {case.context}, sum of parts",
        composition_error(bench, nextn),
    )
    if bench.machine.bandwidth:
        row.microseconds = row.bound = 0.0
        for key, times in counts(case, nextn).items():
            part = found[key]
            assert part.microseconds is not None
            assert part.bound is not None
            row.microseconds += times * part.microseconds
            row.bound += times * part.bound
    return row


@torch.no_grad()
def composition_error(bench: Bench, nextn: int) -> float:
    """Return the largest difference of log-probabilities, or the number of different drafts."""
    active = torch.ones(1, dtype=torch.bool, device=bench.machine.device)
    new, outputs = bench.step(nextn).module(bench.state(nextn), active)
    logprobs, drafts = from_parts(bench.model, bench.state(nextn), nextn, active)
    wrong = (new["window"][:, 1:] != drafts).sum()
    return max(difference(logprobs, outputs["logprobs"]), float(wrong))


def from_parts(model: CausalLM, state: State, nextn: int, active: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and drafts of the slice's step from its parts, with MTP Eagle."""
    start, x = state["lengths"], model.embed(state["window"])
    for index in range(model.config.num_hidden_layers):
        x = Layer(model, index)(state, x, start)[1]["y"]
    head = Head(model)(state, x)[1]
    verdict = Accept(model)(
        state, head["logits"], state["window"], state["num_drafts"], start, active
    )[1]
    n, tokens = verdict["num_tokens"], verdict["tokens"]
    if nextn == 0:
        return verdict["logprobs"], tokens[:, :0]
    first, further, choose = FirstDraft(model), FurtherDraft(model), DraftHead(model)
    new, made = first(state, tokens.clamp(min=0), head["hidden"], start, n - 1)
    cache = new[MTP_CACHE]
    side, drafts = cache[:, :, :0], [choose(state, made["hidden"])[1]["draft"]]
    for _ in range(1, nextn):
        made = further(state, cache, drafts[-1], made["hidden"], start + n, side)[1]
        side = made["side"]
        drafts.append(choose(state, made["hidden"])[1]["draft"])
    return verdict["logprobs"], torch.cat(drafts, dim=1)
