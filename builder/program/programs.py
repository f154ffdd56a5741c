"""From a plan to the two programs of an engine: modules, state and example inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.layers import use_kernels
from mtpbuild.builder.plan import Plan, state_specs
from mtpbuild.builder.program.accept import KernelAcceptance, MixedAcceptance
from mtpbuild.builder.program.draft import Drafter, Eagle, Idle, Vanilla
from mtpbuild.builder.program.step import MixedStepProgram, PrefillProgram, StepProgram
from mtpbuild.runtime.controls import CONTROLS, control_shapes
from mtpbuild.runtime.programs.base import MIXED, PLAIN, program_name

DRAFTERS: dict[str, type[Drafter]] = {"mtp-eagle": Eagle, "mtp-vanilla": Vanilla, "none": Idle}
EXAMPLE_CHUNK, EXAMPLE_BATCH = 7, 17  # any sizes that no other dimension has


@dataclass(frozen=True)
class Program:
    """One graph to trace: its module, and example arguments whose named sizes vary at run time."""

    name: str
    module: nn.Module
    state: tuple[str, ...]
    arguments: dict[str, Tensor]
    results: tuple[str, ...] = ()  # names of the outputs behind the new state
    batch: int = 1  # slots of the example
    whole: bool = False  # takes the caches whole, not just the rows in use

    @property
    def outputs(self) -> tuple[str, ...]:
        return (*(f"{name}.out" for name in self.state), *self.results)


def most_tokens(plan: Plan) -> int:
    """How many tokens the traced chunk of a prompt may have."""
    return max(plan.prefill_chunk, EXAMPLE_CHUNK)


def make_drafter(plan: Plan, nextn: int) -> Drafter | None:
    return None if plan.drafter is None else DRAFTERS[plan.drafter](nextn)


# What the host and the step keep to themselves; prefill fills the rest of the state.
OWN = {"lengths", "window", "num_drafts", "thinking", "draft_probs"}
OUTPUTS = ("tokens", "num_tokens", "logprobs", "margins")
MIXED_OUTPUTS = (*OUTPUTS, "top_ids", "top_logprobs")


def make_programs(plan: Plan, model: CausalLM) -> tuple[Program, ...]:
    """Prefill (one slot), decode (all slots, greedy) and decode_mixed (all slots, any mode).

    An adaptive engine has both of the latter for each number of drafts up to nextn.
    """
    most = plan.nextn
    drafter = make_drafter(plan, most)
    prefill = PrefillProgram(model, drafter)
    style = plan.style
    acceptance = KernelAcceptance if style.all_kernels else MixedAcceptance
    if style.step_kernels:
        use_kernels(model, most_tokens(plan) if style.all_kernels else None)
    names = tuple(s.name for s in state_specs(plan))
    filled = tuple(name for name in names if name not in OWN)
    prompt = {"tokens": _ints(1, EXAMPLE_CHUNK), "start": _ints(1)}
    if drafter is not None and drafter.lookahead:
        prompt["ahead"] = _ints(1, drafter.lookahead)
    B = plan.max_batch if style.fixed or plan.max_batch == 1 else EXAMPLE_BATCH
    active = {"active": torch.ones(B, dtype=torch.bool)}
    programs = [Program("prefill", prefill.eval(), filled, prompt, whole=style.fixed)]
    for nextn in range(most + 1) if plan.adaptive else (most,):
        drafter = make_drafter(plan, nextn)
        step = StepProgram(model, drafter, nextn).eval()
        mixed = MixedStepProgram(model, drafter, nextn, acceptance).eval()
        plain_name, mixed_name = (program_name(kind, nextn, most) for kind in (PLAIN, MIXED))
        controls = active | _controls(plan, B)
        programs += [
            Program(plain_name, step, names, active, OUTPUTS, B, style.whole_caches),
            Program(mixed_name, mixed, names, controls, MIXED_OUTPUTS, B, style.whole_caches),
        ]
    return (*programs,)


def _controls(plan: Plan, B: int) -> dict[str, Tensor]:
    """Example values of what a request asks for, in the order of the table."""
    shapes = control_shapes(plan.nextn, plan.capacity + plan.window)
    return {
        c.name: torch.zeros((B, *shapes[c.name]), dtype=getattr(torch, c.dtype)) for c in CONTROLS
    }


def _ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)
