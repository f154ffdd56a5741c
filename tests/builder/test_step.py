"""Oracles O3, O6 and O7 on the step program itself, run eagerly on checkpoints of odd shapes."""

import numpy as np
import pytest
import torch

from mtpbuild.builder.plan.plan import DrafterName
from tests.reference.recompute import greedy
from tests.support.forced import Run
from tests.support.op_calls import OpCalls
from tests.support.steps import CHUNK, check_case, eager

CASES: list[tuple[str, int, DrafterName | None]] = [
    ("yarn-three-modules", 2, "mtp-vanilla"),
    ("no-q-lora-one-module", 1, "mtp-vanilla"),
    ("ragged-no-interleave", 1, "mtp-eagle"),
    ("all-dense-no-modules", 0, None),
]
FULL: list[tuple[str, int, DrafterName | None]] = [
    ("yarn-three-modules", 0, None),
    *(("yarn-three-modules", k, "mtp-eagle") for k in (1, 2, 3, 4, 5, 7, 15)),
    ("yarn-three-modules", 1, "mtp-vanilla"),
    ("yarn-three-modules", 3, "mtp-vanilla"),
    ("no-q-lora-one-module", 3, "mtp-eagle"),
    ("ragged-no-interleave", 3, "mtp-eagle"),
    ("ragged-no-interleave", 2, "mtp-vanilla"),
]


@pytest.mark.parametrize(
    ("shape", "nextn", "drafter"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)],
)
def test_every_step_equals_recomputation(
    shape: str, nextn: int, drafter: DrafterName | None
) -> None:
    check_case(shape, nextn, drafter)


@pytest.mark.parametrize("most", [2, pytest.param(3, marks=pytest.mark.full)])
def test_any_nextn_may_follow_any_other(most: int) -> None:
    check_case("yarn-three-modules", most, "mtp-eagle", adaptive=True)


@pytest.mark.parametrize(("nextn", "drafter"), [(0, None), (3, "mtp-eagle"), (3, "mtp-vanilla")])
def test_slots_do_not_disturb_each_other(nextn: int, drafter: DrafterName | None) -> None:
    """O7: three requests that join at different steps give what each gives alone."""
    torch.set_num_threads(1)
    programs, reference = eager("yarn-three-modules", nextn, drafter, batch=3)
    rng, T = np.random.default_rng(7), nextn + 1
    prompts = [rng.integers(0, 61, n).tolist() for n in (9, 1, 6)]
    texts = [list(prompt) for prompt in prompts]
    runner = Run(programs, reference, nextn, drafter, CHUNK, rng)
    active = np.zeros(3, np.bool_)
    for step in range(12):
        if step % 3 == 0 and step // 3 < 3:
            slot = step // 3
            runner.prefill(prompts[slot], slot)
            active[slot] = True
        if step == 10:
            active[1] = False  # a slot that leaves
        rows = max(len(text) for text in texts) - 1 + T
        out = programs.step(active, rows)
        for slot in np.flatnonzero(active).tolist():
            texts[slot] += out.tokens[slot, : out.num_tokens[slot]].tolist()
        assert (out.num_tokens[~active] == 0).all()
    for prompt, text in zip(prompts, texts, strict=True):
        assert text[len(prompt) :] == greedy(reference, prompt, len(text) - len(prompt))


@pytest.mark.parametrize(("nextn", "drafter"), [(0, None), (3, "mtp-eagle"), (3, "mtp-vanilla")])
def test_idle_slots_read_no_rows(nextn: int, drafter: DrafterName | None) -> None:
    """What a slot still holds costs a step nothing, and changes nothing, once its request ended."""
    torch.set_num_threads(1)
    programs, reference = eager("yarn-three-modules", nextn, drafter, batch=3)
    runner = Run(programs, reference, nextn, drafter, CHUNK, np.random.default_rng(7))
    prompt = [5, 17, 3, 44, 9, 21]
    for slot in range(3):
        runner.prefill(prompt, slot)
    programs.step(np.ones(3, np.bool_), len(prompt) + nextn)
    for name in programs.caches:
        programs.state[name][[0, 2]] = 1e30
    runner.prefill(prompt, 1)
    text, reads = list(prompt), OpCalls(torch.ops.mtpbuild.mla_attention.default)
    with reads:
        for _ in range(5):
            out = programs.step(np.array([False, True, False]), len(text) + nextn)
            text += out.tokens[1, : out.num_tokens[1]].tolist()
    assert text[len(prompt) :] == greedy(reference, prompt, len(text) - len(prompt))
    passes = reference.config.num_hidden_layers + (nextn if drafter else 0)
    read = [operands[3].tolist() for operands in reads.seen]
    assert len(read) == 5 * passes
    assert all((first, last) == (0, 0) for first, _, last in read)
    assert any(own for _, own, _ in read)
