"""A rank with attention-DP runs the programs of all ranks on its own slots, on CPUs and GPUs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from mtpbuild.runtime.contract.controls import CORE_CONTROLS, StepControls, list_control_shapes
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import Dimension, Manifest, ProgramSpec, TensorSpec
from mtpbuild.runtime.contract.programs import StepOutput
from mtpbuild.runtime.contract.state import make_rows_spec, step_spec
from mtpbuild.runtime.errors import StepError
from mtpbuild.runtime.group import nccl
from mtpbuild.runtime.group.channel import Channel
from mtpbuild.runtime.group.lead import Calls
from mtpbuild.runtime.programs import inductor_cuda
from mtpbuild.runtime.programs.inductor_cpu import CpuAttentionDPPrograms
from mtpbuild.runtime.programs.inductor_cuda import CudaAttentionDPPrograms
from tests.support.fake_gpu import FakeGpu
from tests.support.fakes import fake_manifest

AnyPrograms = CpuAttentionDPPrograms | CudaAttentionDPPrograms
SLOTS, RANKS, WINDOW = 2, 2, 2
STATE = (
    make_rows_spec("kv.0", "layers.0", "float32", (SLOTS, 1, 66, 4)),  # 16 bytes, aligned
    step_spec("lengths", "int64", (SLOTS,)), step_spec("window", "int64", (SLOTS, WINDOW)),
    step_spec("num_drafts", "int64", (SLOTS,)), step_spec("thinking", "bool", (SLOTS,)),
)  # fmt: skip


def ints(name: str, *shape: Dimension) -> TensorSpec:
    return TensorSpec(name=name, dtype="int64", shape=shape)


def floats(name: str, *shape: Dimension) -> TensorSpec:
    return TensorSpec(name=name, dtype="float32", shape=shape)


CACHE = floats("kv.0", "batch", 1, "rows", 3)
CARRIES = tuple(TensorSpec(name=s.name, dtype=s.dtype, shape=s.shape) for s in STATE[1:])
ACTIVE = TensorSpec(name="active", dtype="bool", shape=("batch",))
COUNTS = (ints("tokens", "batch", 2), ints("num_tokens", "batch"))
OUT = (*COUNTS, floats("logprobs", "batch", 2), floats("margins", "batch", 2))
TOP = (ints("top_ids", "batch", 2, 5), floats("top_logprobs", "batch", 2, 5))
SHAPES = list_control_shapes(1, 66)
CONTROLLED = tuple(
    TensorSpec(name=c.name, dtype=c.dtype, shape=("batch", *SHAPES[c.name])) for c in CORE_CONTROLS
)
PROMPT = (ints("tokens", 1, "chunk"), ints("start", 1), ints("ahead", 1, 1))
PROGRAMS: dict[str, tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]] = {
    "prefill": ((floats("kv.0", 1, 1, "rows", 3), *PROMPT), ()),
    "decode": ((CACHE, *CARRIES, ACTIVE), OUT),
    "decode_mixed": ((CACHE, *CARRIES, ACTIVE, *CONTROLLED), (*OUT, *TOP)),
}


class Recorded:
    """A compiled program's place: notes what it ran on; a slot's next token is the next number."""

    ran: tuple[list[tuple[str | int, ...]], ...]

    def __init__(self, name: str, rank: int) -> None:
        self.name, self.rank = name, rank

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        names = [spec.name for spec in PROGRAMS[self.name][0]]
        given = dict(zip(names, inputs, strict=True))
        if self.name == "prefill":
            first, count = int(given["start"]), given["tokens"].shape[1]
            given["kv.0"][0, 0, first : first + count, 0] = given["tokens"][0].float()
            self.ran[self.rank].append((self.name, count))
            return []
        window, active = given["window"], given["active"]
        self.ran[self.rank].append((self.name, len(window)))
        window[:, 0] += active
        emitted = torch.where(active, window[:, 0], -1)
        zeros = torch.zeros(window.shape)
        outputs = [
            torch.stack([emitted, -torch.ones_like(emitted)], 1), active.long(), zeros, zeros,
        ]  # fmt: skip
        tops = torch.zeros(len(window), WINDOW, 5)
        return [*outputs, tops.long(), tops] if self.name == "decode_mixed" else outputs


class Alone:
    """A channel to ranks that say nothing."""

    failure, patience, ranks = None, 10.0, RANKS

    def __init__(self, rank: int) -> None:
        self.rank, self.leaving = rank, list[Callable[[], None]]()

    def share(self, value: bool) -> bool:
        return value

    def unbroken(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def gather(self, own: NDArray[np.uint8]) -> NDArray[np.uint8]:
        every = np.zeros((RANKS, *own.shape), np.uint8)
        every[self.rank] = own
        return every


class NoPeers:
    """Ranks whose sums nobody makes."""

    def failed(self) -> bool:
        return False


@pytest.fixture(params=["cpu", "cuda"])
def ranks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[AnyPrograms]]:
    Recorded.ran = tuple([] for _ in range(RANKS))
    made = {
        name: ProgramSpec(file=f"{name}.pt2", inputs=inputs, outputs=outputs)
        for name, (inputs, outputs) in PROGRAMS.items()
    }
    manifest = fake_manifest(nextn=1, max_batch=SLOTS, ranks=RANKS)
    update: dict[str, Any] = {"programs": made, "state": STATE}

    def programs(rank: int) -> AnyPrograms:
        own: Manifest = manifest.model_copy(update=update | {"rank": rank})

        def opener(device: str) -> Callable[[str], Recorded]:
            return lambda name: Recorded(name, rank)

        channel = cast(Channel, Alone(rank))
        if request.param == "cpu":
            return CpuAttentionDPPrograms(channel, own, 1, opener)
        gpu: Any = FakeGpu()
        return CudaAttentionDPPrograms(channel, nccl.Peers, own, gpu, opener)

    monkeypatch.setattr(inductor_cuda, "connect", lambda *given: NoPeers())
    monkeypatch.setattr(dist, "barrier", lambda: None)
    made_of_all = [programs(rank) for rank in range(RANKS)]
    for ran in Recorded.ran:  # a GPU's steps are run before they are captured
        ran.clear()
    yield made_of_all
    assert Recorded.ran[0] == Recorded.ran[1], "the same programs of the same sizes"


def fill(programs: AnyPrograms, slot: int, prompt: range, chunk: int = 4) -> None:
    """All tokens but the last, then begin."""
    tokens = np.array([*prompt, 0], np.int64)
    last = len(prompt) - 1
    for start in range(0, last, chunk):
        end = min(start + chunk, last)
        programs.prefill(slot, start, tokens[start : end + 1])
    programs.begin(slot, last, prompt[-1])


def step(programs: AnyPrograms, *slots: int) -> StepOutput:
    return programs.step(np.isin(np.arange(SLOTS * RANKS), slots), 16)


def test_prompts_are_filled_in_together(ranks: list[AnyPrograms]) -> None:
    """Chunks of one length at once, a short one by itself; nothing of it reaches another's slot."""
    for programs in ranks:
        fill(programs, 0, range(100, 111))  # 4 + 4 + 2 tokens, on rank 0
        fill(programs, 2, range(200, 206))  # 4 + 1, on rank 1
        fill(programs, 3, range(300, 305))  # 4, on rank 1
    assert Recorded.ran[0] == [], "they wait for the step"
    for programs in ranks:
        step(programs, 0, 2, 3)
    chunks = [count for name, count in Recorded.ran[0] if name == "prefill"]
    assert chunks == [4, 4, 2, 1, 4]
    caches = [programs.state["kv.0"][:, 0, :, 0] for programs in ranks]
    assert caches[0][0, :10].tolist() == [*range(100, 110)]
    assert not caches[0][0, 10:].any()
    assert not caches[0][1].any()
    assert caches[1][0, :5].tolist() == [*range(200, 205)]
    assert caches[1][1, :4].tolist() == [*range(300, 304)]
    assert not caches[1][1, 4:].any()


@pytest.mark.parametrize("call", ["move", "finite"])
def test_a_queued_chunk_that_fails_is_a_failed_step(ranks: list[AnyPrograms], call: str) -> None:
    """Host work runs it, but its failure leaves other requests without their rows."""

    def fail(chunk: int) -> None:
        raise MemoryError("no room for a chunk")

    for programs, other in zip(ranks, reversed(range(RANKS)), strict=True):
        programs._prefill_padding = fail  # type: ignore[method-assign]
        programs.prefill(other * SLOTS, 0, np.arange(5))
        with pytest.raises(StepError, match=r"^a step failed: no room for a chunk$"):
            Calls(programs, programs._channel).do_host_work(call, (0, 1))


def test_steps(ranks: list[AnyPrograms]) -> None:
    """One request on any rank decides for all which program runs, and on how many slots."""
    sampled = StepControls(temperature=1.0, seed=3)
    for rank, programs in enumerate(ranks):
        programs.begin(0, 0, 10)
        programs.begin(2, 0, 30, sampled)
        programs.begin(3, 0, 40)
        own = slice(rank * SLOTS, rank * SLOTS + SLOTS)
        said = [
            step(programs, *slots).tokens[own, 0].tolist()
            for slots in ([0], [0, 2], [0, 2, 3], [0, 3])
        ]
        assert said == (
            [[-1, -1], [31, -1], [32, 41], [-1, 42]]
            if rank
            else [[11, -1], [12, -1], [13, -1], [14, -1]]
        )
        programs.move(3, 2)
        output = step(programs, 0, 2)
        assert output.tokens[own].tolist() == [[[15, -1], [-1, -1]], [[43, -1], [-1, -1]]][rank]
        assert output.num_tokens[own].tolist() == [1, 0]
        assert output.num_drafts.shape == (SLOTS * RANKS,)
        assert output.top_ids is None
    mixed = "decode_mixed"
    assert Recorded.ran[0] == [("decode", 1), (mixed, 1), (mixed, 2), ("decode", 2), ("decode", 1)]


def test_steps_overlap_on_gpus(ranks: list[AnyPrograms]) -> None:
    """A step is gathered when it is read, behind the launch of the next one."""
    for programs in ranks:
        overlap = Feature.OVERLAP in programs.features
        assert overlap == isinstance(programs, CudaAttentionDPPrograms)
        if not isinstance(programs, CudaAttentionDPPrograms):
            continue  # the host waits for each step
        programs.begin(0, 0, 10)
        programs.begin(2, 0, 30)
        active = np.array([True, False, True, False])
        lands = [programs.launch(active, 16) for _ in range(3)][1:]
        own = slice(programs._rank * SLOTS, programs._rank * SLOTS + 1)
        output = [land().tokens[own, 0].tolist() for land in lands]
        assert output == [[[12], [13]], [[32], [33]]][programs._rank]
