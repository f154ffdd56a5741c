"""The ops that target tensorrt has kernels for say what is traced elsewhere, step after step.

Acceptance in every mode, drafts, and experts that are chosen of many.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.plan.plan import DrafterName, Plan, make_state_specs
from mtpbuild.builder.program.programs import Program, make_programs
from tests.support.checkpoints import lower, make_predictable
from tests.support.styles import style_of

SLOTS, STEPS = 8, 4
FIXED = GraphStyle(for_gpu=True, whole_caches=True, all_slots=True)


def controls(program: Program) -> dict[str, Tensor]:
    """Each slot in a mode of its own, with filters and without; all but one are active."""
    pick = torch.randint
    chance = torch.tensor([0.0, 1.0]).index_select(0, pick(2, (SLOTS,)))
    window = program.arguments["synthetic"].shape
    return {
        "active": torch.arange(SLOTS) != 3,
        "temperature": torch.tensor([0.0, 0.7]).repeat(SLOTS // 2),
        "top_k": pick(0, 20, (SLOTS,)),
        "top_p": 1 - 0.2 * chance,
        "min_p": 0.02 * chance.flip(0),
        "rejection": torch.arange(SLOTS) >= 4,
        "block": torch.arange(SLOTS) >= 6,
        "synthetic": torch.full(window, -1.0),
        "sampled_drafts": torch.arange(SLOTS) != 5,
        "relaxed_topk": torch.tensor([1, 1, 4, 1, 1, 1, 1, 1]),
        "relaxed_delta": torch.full((SLOTS,), 0.3),
        "thinking_ids": torch.tensor([[5, 6]] * SLOTS),
        "banned_ids": pick(-1, 61, program.arguments["banned_ids"].shape),
        "banned_until": pick(0, 9, (SLOTS,)),
        "uniforms": torch.rand(program.arguments["uniforms"].shape),
    }


@torch.no_grad()
@pytest.mark.parametrize(("nextn", "drafter"), [(0, None), (2, "mtp-eagle"), (2, "mtp-vanilla")])
def test_steps_are_the_same(nextn: int, drafter: DrafterName | None) -> None:
    torch.set_num_threads(1)
    reference = make_predictable(
        num_hidden_layers=2, num_nextn_predict_layers=2, n_routed_experts=24
    )
    plan = Plan(reference.config, nextn, drafter, SLOTS, 100, 4, FIXED)
    plain, own = (
        make_programs(p, lower(reference))[2]
        for p in (plan, replace(plan, style=style_of("tensorrt", dtype="float32")))
    )
    torch.manual_seed(1)
    state = {
        s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for s in make_state_specs(plan)
    }
    state["lengths"] += 3
    state["window"][:, 0] = torch.randint(61, (SLOTS,))
    state["thinking"][2] = True
    drawn = controls(plain)
    assert drawn.keys() == plain.arguments.keys()
    given = {name: drawn[name] for name in own.arguments}
    emitted = 0
    for _ in range(STEPS):
        wanted, outputs = plain.module(state, *given.values())
        got, own_outputs = own.module(state, *given.values())
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(own_outputs, outputs)
        state, emitted = wanted, emitted + int(outputs["num_tokens"].sum())
    assert emitted > STEPS * (SLOTS - 1) or not nextn, "drafts are accepted"
