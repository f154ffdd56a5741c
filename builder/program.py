"""From a plan to the two programs of an engine: modules, state and example inputs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtpbuild.builder.draft import Drafter, Eagle, Idle, Vanilla
from mtpbuild.builder.model.deepseek_v3 import DeepseekV3
from mtpbuild.builder.plan import Plan, state_specs
from mtpbuild.builder.step import PrefillProgram, StepProgram

EXAMPLE_CHUNK = 7  # any size that no other dimension has


@dataclass(frozen=True)
class Program:
    """One graph to trace: its module, and example arguments whose named sizes vary at run time."""

    name: str
    module: nn.Module
    state: tuple[str, ...]
    arguments: dict[str, Tensor]
    outputs: tuple[str, ...]


def make_drafter(plan: Plan) -> Drafter | None:
    drafters: dict[str, Callable[[int], Drafter]]
    drafters = {"mtp-eagle": Eagle, "mtp-vanilla": Vanilla, "none": Idle}
    return None if plan.drafter is None else drafters[plan.drafter](plan.nextn)


def make_programs(plan: Plan, model: DeepseekV3) -> tuple[Program, Program]:
    """Prefill (one slot) and decode (all slots) of one engine, on the model's device."""
    drafter = make_drafter(plan)
    prefill, step = PrefillProgram(model, drafter), StepProgram(model, drafter, plan.nextn)
    specs = state_specs(plan)
    own = {"lengths", "window", "num_drafts"}  # the host's and the step's alone
    filled = tuple(s.name for s in specs if s.name not in own)
    prompt = {"tokens": _ints(1, EXAMPLE_CHUNK), "start": _ints(1)}
    if drafter is not None and drafter.lookahead:
        prompt["ahead"] = _ints(1, drafter.lookahead)
    return (
        Program(
            "prefill",
            prefill.eval(),
            filled,
            prompt,
            tuple(f"{name}.out" for name in filled),
        ),
        Program(
            "decode",
            step.eval(),
            tuple(s.name for s in specs),
            {"active": torch.ones(plan.max_batch, dtype=torch.bool)},
            (*(f"{s.name}.out" for s in specs), "tokens", "num_tokens", "logprobs", "margins"),
        ),
    )


def _ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)
