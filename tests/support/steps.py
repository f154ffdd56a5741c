"""Checks a step program, run eagerly, against the recomputation of every step (O3, O6)."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.plain import PlainLM
from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.plan.plan import DrafterName, Plan, make_state_specs
from tests.reference.eager import EagerPrograms
from tests.reference.recompute import cache_rows
from tests.support.checkpoints import SHAPES, lower, make_predictable
from tests.support.forced import ROWS, STATES, Run, Seen

CHUNK = 4


def eager(
    shape: str, nextn: int, drafter: DrafterName | None, batch: int = 1
) -> tuple[EagerPrograms, PlainDeepseek]:
    reference = make_predictable(**SHAPES[shape])
    plan = Plan(reference.config, nextn, drafter, batch, 200, CHUNK)
    return EagerPrograms(plan, lower(reference)), reference


def check_family(
    reference: PlainLM,
    nextn: int,
    drafter: DrafterName | None,
    bug: Callable[[CausalLM], None] = lambda model: None,
    accepts_all: bool = True,
) -> None:
    """Check a family's step program against its plain model; bug: a change of the program."""
    model = lower(reference)
    bug(model)
    check_steps(
        Plan(reference.config, nextn, drafter, 1, 200, CHUNK), model, reference, accepts_all
    )


def check_case(shape: str, nextn: int, drafter: DrafterName | None, adaptive: bool = False) -> None:
    reference = make_predictable(**SHAPES[shape])
    plan = Plan(reference.config, nextn, drafter, 1, 200, CHUNK, adaptive=adaptive)
    check_steps(plan, lower(reference), reference)


def check_steps(plan: Plan, model: CausalLM, reference: PlainLM, accepts_all: bool = True) -> None:
    """Check prompts of each length around a chunk's border; every n and num_drafts must occur."""
    torch.set_num_threads(1)
    nextn, rng, seen = plan.nextn, np.random.default_rng(plan.nextn), Seen()
    for length in (1, 2, 3, CHUNK, CHUNK + 1, CHUNK + 2, 11) * (1 + nextn // 5):
        programs = EagerPrograms(plan, model)
        prompt = rng.integers(0, reference.config.vocab_size, length).tolist()
        run = Run(programs, reference, nextn, plan.drafter, CHUNK, rng, plan.adaptive)
        tokens, saw = run.steps(prompt, 10)
        seen.accepted |= saw.accepted
        seen.num_drafts |= saw.num_drafts
        programs.fill_drafter()
        check_state(programs, reference, tokens)
    assert seen.accepted == set(range(1, nextn + 2)) or not accepts_all
    assert seen.num_drafts == set(range(nextn + 1))


def check_state(programs: EagerPrograms, reference: PlainLM, tokens: list[int]) -> None:
    """Check O6: committed rows equal recomputed ones and those of a fresh prefill in one chunk."""
    plan, length = programs.plan, len(tokens) - 1
    recurrent = [spec for spec in make_state_specs(plan) if spec.role == "recurrent"]
    # A delta rule's norm may divide by nearly nothing: for token 51 of "qwen3.5" alone the plain
    # model in fp32 is 1.1e-4 off fp64, and both sides here may be.
    atol = 2.5e-4 if recurrent else 2e-4
    if isinstance(reference, PlainDeepseek):
        for i, rows in enumerate(cache_rows(reference, tokens[:-1])):
            got = programs.state[f"kv.{i}"][0, 0, :length]
            np.testing.assert_allclose(got, rows, atol=atol, err_msg=ROWS)
    fresh = EagerPrograms(plan, programs.step_program.module.model)  # type: ignore[arg-type]
    Run(fresh, reference, plan.nextn, plan.drafter, 1000, np.random.default_rng(0)).prefill(tokens)
    for spec in recurrent:
        got, wanted = programs.state[spec.name], fresh.state[spec.name]
        np.testing.assert_allclose(got, wanted, atol=atol, err_msg=STATES)
    for name, cache in fresh.state.items():
        if "kv." not in name:
            continue
        module = int(name.partition(".")[2])  # slot p of module k is final iff p + k <= M
        late = name.startswith("mtp_kv.") and plan.drafter == "mtp-vanilla"
        final = length - (module if late else 0)
        got = programs.state[name][0, 0, :final]
        np.testing.assert_allclose(got, cache[0, 0, :final], atol=atol, err_msg=ROWS)


def begin(plan: Plan, rows: int = 5) -> dict[str, Tensor]:
    """Make a state with so many committed rows in each slot, a newest token, and no drafts."""
    torch.manual_seed(2)
    state = {}
    for spec in make_state_specs(plan):
        value = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
        if spec.role == "rows":
            value[:, :, :rows].normal_(std=0.3)
        state[spec.name] = value
    state["lengths"] += rows
    state["window"][:, 0] = torch.arange(plan.max_batch) + 7
    return state
