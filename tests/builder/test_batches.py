"""Batches in a built engine: any number of slots, joining, leaving and moving (oracle O7)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpbuild.runtime.contract.controls import GREEDY, HISTORY, StepControls
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.contract.programs import StepOutput
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.programs.onnxruntime import DeviceCaches, OnnxPrograms
from tests.support.engines import EngineBuilder

pytestmark = pytest.mark.xdist_group("predictable")  # another worker would wait for the engines
CHUNK, T, SLOTS = 4, 4, 3
ENGINES = [
    pytest.param((0,), marks=pytest.mark.full),
    pytest.param((3, "mtp-eagle"), marks=pytest.mark.full),
    (3,),
]
HOT = StepControls(temperature=0.8, top_p=0.95, seed=5)
REJECTING = StepControls(temperature=1.3, rejection=True, seed=6)
RELAXED = StepControls(relaxed_topk=9, relaxed_delta=0.9, thinking=True)  # to the end
MODES = {"greedy": GREEDY, "sampled": HOT, "rejection": REJECTING, "relaxed": RELAXED}
# State that only one mode reads:
MODE_OF = {"draft_probs": "rejection", "thinking": "relaxed", HISTORY: "penalised"}


def load(engine: Path) -> OnnxPrograms:
    programs = load_programs(engine, read_manifest(engine), threads=1)
    assert isinstance(programs, OnnxPrograms)
    return programs


@pytest.fixture
def vanilla(predictable_engine: EngineBuilder) -> OnnxPrograms:
    return load(predictable_engine(3, max_batch=SLOTS))


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(9, 61, length).tolist()


def fill(programs: OnnxPrograms, slot: int, tokens: list[int]) -> None:
    """All of a prompt but its last token."""
    ahead = programs.lookahead
    known = np.array(tokens + [0] * ahead, np.int64)
    for start in range(0, len(tokens) - 1, CHUNK):
        stop = min(start + CHUNK, len(tokens) - 1)
        programs.prefill(slot, start, known[start : stop + ahead])


def start(programs: OnnxPrograms, slot: int, tokens: list[int], controls: StepControls) -> None:
    fill(programs, slot, tokens)
    programs.begin(slot, len(tokens) - 1, tokens[-1], controls)


def step(programs: OnnxPrograms, *slots: int) -> StepOutput:
    active = np.zeros(len(programs.state["lengths"]), np.bool_)
    active[list(slots)] = True
    return programs.step(active, int(programs.state["lengths"].max()) + T)


def seen(output: StepOutput, slot: int) -> tuple[list[int], list[int], int]:
    """Return what a slot judged and emitted; the window has the drafts of the step before."""
    tokens = output.tokens[slot, : output.num_tokens[slot]].tolist()
    return output.window[slot].tolist(), tokens, int(output.num_drafts[slot])


@pytest.mark.full
@pytest.mark.parametrize("kind", ENGINES)
def test_one_slot_of_many_is_the_engine_for_one(
    kind: tuple[Any, ...], predictable_engine: EngineBuilder
) -> None:
    """The graph with an open batch, run on one slot, gives what the static graph gives."""
    static, many = (load(predictable_engine(*kind, max_batch=n)) for n in (1, SLOTS))
    for controls in (GREEDY, HOT):
        for programs in (static, many):
            start(programs, 0, prompt(1, 11), controls)
        for _ in range(8):
            wanted, got = step(static, 0), step(many, 0)
            assert seen(got, 0) == seen(wanted, 0)
            assert got.num_tokens[1:].tolist() == [0, 0]
            for name in ("logprobs", "margins"):
                near = getattr(got, name)[0], getattr(wanted, name)[0]
                np.testing.assert_allclose(*near, atol=2e-4)
    length = int(static.state["lengths"][0])
    for name, tensor in static.state.items():
        own, other = (t[0, 0, :length] if t.ndim == 4 else t[0] for t in (many.state[name], tensor))
        np.testing.assert_allclose(own, other, atol=2e-4, err_msg=name)
        assert not many.state[name][1:].any(), "slots that were not asked for are not computed"


def test_a_prompt_is_filled_in_behind_running_slots(vanilla: OnnxPrograms) -> None:
    """Steps between its chunks cover fewer slots, and once all of them."""
    asked = prompt(2, 14)
    start(vanilla, 0, asked, GREEDY)
    wanted = [seen(step(vanilla, 0), 0) for _ in range(6)]

    start(vanilla, 0, prompt(3, 30), GREEDY)
    start(vanilla, 1, prompt(4, 5), GREEDY)
    known = np.array(asked + [0] * vanilla.lookahead, np.int64)
    for first, running in ((0, (0, 1)), (4, (0,)), (8, (0, 1)), (12, (0,))):
        stop = min(first + CHUNK, len(asked) - 1)
        vanilla.prefill(2, first, known[first : stop + vanilla.lookahead])
        step(vanilla, *running)
    vanilla.begin(2, len(asked) - 1, asked[-1])
    assert [seen(step(vanilla, 0, 2), 2) for _ in range(6)] == wanted


def test_a_slot_that_pauses_keeps_its_state(vanilla: OnnxPrograms) -> None:
    asked = prompt(5, 9)
    start(vanilla, 0, asked, GREEDY)
    wanted = [seen(step(vanilla, 0), 0) for _ in range(6)]
    start(vanilla, 0, prompt(3, 30), GREEDY)
    start(vanilla, 2, asked, GREEDY)
    got = []
    for pauses in (0, 1, 2, 3, 0, 1):
        got.append(seen(step(vanilla, 0, 2), 2))
        for _ in range(pauses):
            step(vanilla, 0)
    assert got == wanted


@pytest.mark.parametrize(
    ("portable", "cleared"),
    [
        (False, True),
        pytest.param(True, True, marks=pytest.mark.full),
        pytest.param(True, False, marks=pytest.mark.full),
    ],
)
def test_nan_ends_in_its_slot(
    portable: bool, cleared: bool, predictable_engine: EngineBuilder
) -> None:
    """A slot says so, and others go on.

    Once it is cleared it can be used again. Our kernels read no row that is masked, others do.
    """
    vanilla = load(predictable_engine(3, max_batch=SLOTS, portable=portable))
    asked = prompt(2, 14)
    for slot in (0, 1):
        start(vanilla, slot, asked, GREEDY)
    wanted = [seen(step(vanilla, 0, 1), 0) for _ in range(6)]

    start(vanilla, 0, asked, GREEDY)
    start(vanilla, 1, prompt(3, 60), GREEDY)
    step(vanilla, 0, 1)  # and again: rows of both lie beside each other now
    start(vanilla, 0, asked, GREEDY)
    vanilla.state["kv.0"][1, 0, 40] = np.nan
    outputs = []
    for _ in range(3):
        output = step(vanilla, 0, 1)
        assert output.finite(0)
        assert not output.finite(1)
        assert (output.tokens[1, : output.num_tokens[1]] >= 0).all()
        outputs.append(seen(output, 0))
    if cleared:
        vanilla.clear(1)
    start(vanilla, 1, asked, GREEDY)
    again = []
    for _ in range(6):
        output = step(vanilla, 0, 1)
        outputs.append(seen(output, 0))
        again.append((seen(output, 1), output.finite(1)))
    assert outputs[:6] == wanted
    assert (again == [(each, True) for each in wanted]) == cleared


def on_a_device(engine: Path) -> OnnxPrograms:
    """Load as --provider cuda does: bound by address, moved through the host, in CPU memory."""
    manifest = read_manifest(engine)
    return OnnxPrograms(engine, manifest, DeviceCaches(manifest.state, "cpu"), 1)


def test_caches_on_a_device(predictable_engine: EngineBuilder) -> None:
    """Prompts that outgrow the layout, slots that leave and move: as on the host."""
    engine = predictable_engine(3, max_batch=SLOTS)
    host, device = load(engine), on_a_device(engine)
    for programs in (host, device):
        start(programs, 1, prompt(8, 20), GREEDY)
        start(programs, 2, prompt(7, 10), HOT)
    for slots in ((1, 2), (2,), (1, 2)):
        wanted, got = step(host, *slots), step(device, *slots)
        assert [seen(got, s) for s in slots] == [seen(wanted, s) for s in slots]
    for programs in (host, device):
        programs.move(2, 0)
        start(programs, 2, prompt(9, 150), GREEDY)  # more rows than the layout has
    for _ in range(6):
        wanted, got = step(host, 0, 1, 2), step(device, 0, 1, 2)
        assert [seen(got, s) for s in range(3)] == [seen(wanted, s) for s in range(3)]
    for name, tensor in host.state.items():
        np.testing.assert_array_equal(device.state[name], tensor, err_msg=name)


def after_a_move(
    programs: OnnxPrograms, controls: StepControls, forgotten: str | None = None
) -> list[tuple[list[int], list[int], int]]:
    """Run a request that moves to slot 0, which another one held, after 4 of its 16 steps.

    forgotten: a state tensor that the move leaves as it was.
    """
    held = tuple(prompt(6, 40))
    other = StepControls(
        temperature=0.5, top_k=3, seed=9, repetition_penalty=1.1, prompt_length=40, history=held
    )
    start(programs, 0, prompt(6, 40), other)
    start(programs, 2, prompt(7, 10), controls)
    got = [seen(step(programs, 0, 2), 2) for _ in range(4)]
    programs.begin(0, 39, 60, other)  # in no tensor as far as the one that moves
    before = {name: tensor[0].copy() for name, tensor in programs.state.items()}
    programs.move(2, 0)
    if forgotten is not None:
        programs.state[forgotten][0] = before[forgotten]
    return got + [seen(step(programs, 0), 0) for _ in range(12)]


MODES["penalised"] = StepControls(
    frequency_penalty=1.0, repetition_penalty=1.8, prompt_length=10, history=(*prompt(7, 10),)
)


@pytest.mark.parametrize("mode", MODES)
def test_a_moved_request_goes_on_as_if_it_had_stayed(vanilla: OnnxPrograms, mode: str) -> None:
    """A move that forgets any one state tensor is found out too."""
    start(vanilla, 0, prompt(7, 10), MODES[mode])
    wanted = [seen(step(vanilla, 0), 0) for _ in range(16)]
    assert after_a_move(vanilla, MODES[mode]) == wanted
    read = [name for name in vanilla.state if MODE_OF.get(name, "greedy") == mode]
    for name in read:
        assert after_a_move(vanilla, MODES[mode], name) != wanted, name
    assert bool(read) == (mode != "sampled"), "sampling reads nothing but what greedy steps read"
