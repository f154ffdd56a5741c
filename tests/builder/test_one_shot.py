"""`--allreduce-strategy one-shot`: which sums it takes, what it refuses, how ranks share memory.

The kernel is in `tests/plugins/test_sum_of_ranks.py`, tokens in `test_ranks_cuda.py`.
"""

import sys
from collections import Counter
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mtpbuild.builder.models.common.weight import Share
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.program.programs import make_programs
from mtpbuild.builder.program.trace import TracedProgram
from mtpbuild.builder.targets.inductor import Inductor
from mtpbuild.builder.targets.inductor.gpu_passes import name_op
from mtpbuild.runtime.contract.manifest import TargetInfo
from mtpbuild.runtime.contract.sums import BYTES, CALLS, MOST, PEERS
from mtpbuild.runtime.contract.targets import find_target
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.group import nccl
from mtpbuild.runtime.group.nccl import Peers
from mtpbuild.runtime.ranks import Ranks
from tests.support.checkpoints import lower, make_model
from tests.support.fake_gpu import FakeGpu

ONE_SHOT = Inductor("cuda", allreduce_strategy="one-shot")
HIDDEN = 32


def traced(program: int, max_batch: int, chunk: int = 8) -> TracedProgram:
    """Trace prefill (0) or decode (1) of a rank of two with a layer, nextn 1."""
    model = make_model(num_hidden_layers=1, num_nextn_predict_layers=1, vocab_size=64)
    ranks, style = Ranks(2), ONE_SHOT.style
    assert model.config.hidden_size == HIDDEN
    sizes = 1, "mtp-eagle", max_batch, 2 * chunk, chunk
    plan = Plan(model.config, *sizes, style, ranks, ("9.0",))
    return ONE_SHOT.trace(make_programs(plan, lower(model, Share(ranks, 1)))[program], plan)


def sums(graph: TracedProgram) -> tuple[list[Tensor], list[Tensor]]:
    """Return what is summed by one-shot sums, and what by NCCL."""
    found: dict[str, list[Tensor]] = {"sum_of_ranks": [], "all_reduce": []}
    for node in graph.exported.graph.nodes:
        if (name := name_op(node).partition("::")[2]) in found:
            found[name].append(node.args[0].meta["val"])
    return found["sum_of_ranks"], found["all_reduce"]


@pytest.mark.full
def test_a_step_of_few_slots() -> None:
    """All its sums, the narrow one that heads exchange, too."""
    graph = traced(1, max_batch=4)
    own, others = sums(graph)
    assert (len(own), len(others)) == (9, 0), "four of a pass, and a draft's projection"
    calls = Counter(name_op(node) for node in graph.exported.graph.nodes)
    assert "_c10d_functional::wait_tensor" not in calls
    peers = graph.exported.state_dict[f"model.{PEERS}"]
    assert (peers.shape, peers.dtype) == ((3,), torch.int64)


@pytest.mark.full
def test_the_most_slots_decide() -> None:
    """Whichever number of slots a step has, its program is the same: the largest sum counts."""
    fit = MOST // (2 * HIDDEN * 4)  # slots of a window of two tokens in fp32
    own, others = sums(traced(1, max_batch=fit))
    assert (len(own), len(others)) == (9, 0)
    own, others = sums(traced(1, max_batch=fit + 1))
    assert len(others) == 5, "of the window, not of one token of it"
    assert all(tensor.shape[-2:] == (2, HIDDEN) for tensor in others)
    assert len(own) == 4


@pytest.mark.full
def test_long_chunks_stay_with_nccl() -> None:
    own, others = sums(traced(0, max_batch=1, chunk=MOST // (HIDDEN * 4) + 1))
    assert others
    assert all(isinstance(tensor.shape[1], torch.SymInt) for tensor in others)
    assert all(tensor.shape[1] == 1 for tensor in own)


def test_the_manifest_and_what_builds_it_again() -> None:
    plan: Any = SimpleNamespace(compute_capabilities=("9.0",))
    target = ONE_SHOT.info(plan)
    assert target.allreduce_strategy == "one-shot"
    given: Any = SimpleNamespace(target=target, build=SimpleNamespace(dtype="float32"))
    flags = find_target("inductor").build_flags(given)
    assert flags["allreduce_strategy"] == "one-shot"
    by_nccl = replace(ONE_SHOT, allreduce_strategy="nccl").info(plan)
    assert by_nccl == TargetInfo(**target.model_dump() | {"allreduce_strategy": None})


class Sharing(Peers):
    """A group whose GPUs share memory, or don't."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.refusal, self.memory = refusal, torch.full((BYTES,), 7, dtype=torch.uint8)

    def share(self, size: int) -> tuple[Tensor, list[int]]:
        assert size == BYTES
        if self.refusal is not None:
            raise self.refusal
        return self.memory, [self.memory.data_ptr(), 4096]


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Any:
    from contextlib import nullcontext

    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return SimpleNamespace(ranks=2, rank=1, patience=5.0, leaving=[], unbroken=nullcontext)


def test_what_programs_are_told(channel: Any) -> None:
    """Memory is zeros when they begin; when the group is left, nobody waits any longer."""
    gpu: Any = FakeGpu()
    peers = Sharing()
    told = nccl.share_memory(gpu, channel, peers)
    assert told.tolist() == [peers.memory.data_ptr(), 4096, 1]
    assert not peers.memory.any()
    (leave,) = channel.leaving
    leave()
    assert (peers.memory[:CALLS].view(torch.int32) == nccl.FAR).all()


def test_where_gpus_share_no_memory(channel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = FakeGpu()
    says = r"see each other's memory \(no peer access\): build it with `--allreduce-strategy nccl`$"
    with pytest.raises(EngineError, match=says):
        nccl.share_memory(gpu, channel, Sharing(RuntimeError("no peer access\nat line 5")))
    with pytest.raises(EngineError, match=r"memory \(no module\)"):
        nccl.share_memory(gpu, channel, Sharing(ImportError("no module")))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(EngineError, match=r"need all 2 ranks on one machine, it has 1: build it"):
        nccl.share_memory(gpu, channel, Sharing())


def test_torch_is_asked_for_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor may be a piece of what torch shares: it is as far inside on every rank."""
    name = "torch.distributed._symmetric_memory"
    real = pytest.importorskip(name)
    assert real.empty
    assert real.rendezvous
    from contextlib import nullcontext

    module, made = ModuleType(name), list[Any]()
    memory = torch.zeros(BYTES, dtype=torch.uint8)

    def empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        made.append((size, dtype, device))
        return memory

    def rendezvous(tensor: Tensor, group: object) -> Any:
        made.append(group)
        own = tensor.data_ptr() - 512
        return SimpleNamespace(rank=1, buffer_ptrs=[1 << 20, own])

    module.empty, module.rendezvous = empty, rendezvous  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(dist, "_symmetric_memory", module, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    peers = Peers.__new__(Peers)
    peers.group, peers._device = "the group", torch.device("cuda", 1)  # type: ignore[assignment]
    got, addresses = peers.share(BYTES)
    assert got is memory
    assert addresses == [(1 << 20) + 512, memory.data_ptr()]
    assert made == [(BYTES, torch.uint8, torch.device("cuda", 1)), "the group"]
