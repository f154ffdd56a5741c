"""Checks a step program, run eagerly, against the recomputation of every step (O3, O6)."""

import numpy as np
import torch

from mtpbuild.builder.models.deepseek_v3.reference import Transformer
from mtpbuild.builder.plan import DrafterName, Plan
from tests.reference.eager import EagerPrograms
from tests.reference.recompute import cache_rows
from tests.support.checkpoints import SHAPES, lower, make_predictable
from tests.support.forced import Run, Seen

CHUNK = 4


def eager(
    shape: str,
    nextn: int,
    drafter: DrafterName | None,
    batch: int = 1,
    adaptive: bool = False,
) -> tuple[EagerPrograms, Transformer]:
    reference = make_predictable(**SHAPES[shape])
    plan = Plan(reference.config, nextn, drafter, batch, 200, CHUNK, adaptive=adaptive)
    return EagerPrograms(plan, lower(reference)), reference


def check_case(shape: str, nextn: int, drafter: DrafterName | None, adaptive: bool = False) -> None:
    """Check prompts of each length around a chunk's border; every n and num_drafts must occur."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(nextn)
    seen = Seen()
    for length in (1, 2, 3, CHUNK, CHUNK + 1, CHUNK + 2, 11) * (1 + nextn // 5):
        programs, reference = eager(shape, nextn, drafter, adaptive=adaptive)
        prompt = rng.integers(0, reference.config.vocab_size, length).tolist()
        run = Run(programs, reference, nextn, drafter, CHUNK, rng, adaptive)
        tokens, saw = run.steps(prompt, 10)
        seen.accepted |= saw.accepted
        seen.num_drafts |= saw.num_drafts
        check_state(programs, reference, tokens)
    assert seen.accepted == set(range(1, nextn + 2))
    assert seen.num_drafts == set(range(nextn + 1))


def check_state(programs: EagerPrograms, reference: Transformer, tokens: list[int]) -> None:
    """Check O6: committed rows equal recomputed ones, and those of a fresh prefill in one chunk."""
    plan, length = programs.plan, len(tokens) - 1
    for i, rows in enumerate(cache_rows(reference, tokens[:-1])):
        np.testing.assert_allclose(programs.state[f"kv.{i}"][0, 0, :length], rows, atol=2e-4)
    fresh = EagerPrograms(plan, programs.step_program.module.model)  # type: ignore[arg-type]
    Run(fresh, reference, plan.nextn, plan.drafter, 1000, np.random.default_rng(0)).prefill(tokens)
    for name, cache in fresh.state.items():
        if not name.startswith("mtp_kv."):
            continue
        module = int(name.removeprefix("mtp_kv."))  # slot p of module k is final iff p + k <= M
        final = length - (module if plan.drafter == "mtp-vanilla" else 0)
        got = programs.state[name][0, 0, :final]
        np.testing.assert_allclose(got, cache[0, 0, :final], atol=2e-4)
