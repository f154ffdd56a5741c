"""Target inductor without its compiler: programs run eagerly, from their exported graphs.

Everything else in an engine of several ranks is real (weights, processes, torch.distributed),
except GPUs, which are `FakeGpu`s that gloo connects. Compiling a program would take a core a
minute.
`python -m tests.support.eager_ranks` is a rank that another process started.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

import mtpbuild.plugins  # registers the graphs' ops
from mtpbuild.runtime.contract.manifest import CONSTANTS, WEIGHTS, Manifest, read_manifest
from mtpbuild.runtime.contract.programs import Programs
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.gpu import torch_cuda
from mtpbuild.runtime.group import start as ranks
from mtpbuild.runtime.group.channel import Channel
from mtpbuild.runtime.programs import follow
from mtpbuild.runtime.programs.aot_package import Opener
from tests.support import rank_bugs
from tests.support.collectives import HERE, GlooPeers, RankGpu, listened_to
from tests.support.registry import registered

if TYPE_CHECKING:
    from mtpbuild.builder.program.trace import TracedProgram
    from mtpbuild.builder.weights.placed import ByteRange

ROOT = Path(__file__).parents[2]
GPUS, TAKEN = "FAKE_GPUS", "FAKE_GPU_TAKEN"  # in the environment: how many; one that can't be had


def lower(traced: "TracedProgram", weights: "Mapping[str, ByteRange]", folder: Path) -> str:
    from mtpbuild.builder.targets.inductor.lowering import _write_constants

    file = f"{traced.name}.pt2"
    torch.export.save(traced.exported, folder / file)
    _write_constants(traced.name, traced.exported, weights, folder, {})
    return file


class EagerPackage:
    """A stand-in for `Package` that runs a program and copies the new state over the old one."""

    def __init__(
        self,
        folder: Path,
        name: str,
        weights: Mapping[str, torch.Tensor],
        peers: torch.Tensor | None = None,
    ) -> None:
        manifest = read_manifest(folder)
        spec = manifest.programs[name]
        path = folder / spec.file
        own = load_file(path.with_name(CONSTANTS.format(path.stem)))
        rank = torch.tensor([manifest.rank or 0])
        own |= {name: rank for name in own if name.endswith(".rank")}
        own |= {name: peers for name in own if name.endswith(".peers") and peers is not None}
        named = {f"model.{name}": weight for name, weight in weights.items()} | own
        self._inputs, self._outputs = ([t.name for t in ts] for ts in (spec.inputs, spec.outputs))
        self._name = name
        self._program = listened_to(torch.export.load(path).module(check_guards=False))
        parameters = {name: named[name] for name, _ in self._program.named_parameters()}
        self._program.load_state_dict(parameters, strict=False, assign=True)

    @torch.no_grad()
    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        given = dict(zip(self._inputs, inputs, strict=True))
        state = {name: given.pop(name) for name in self._inputs if f"{name}.out" in self._outputs}
        with HERE.of(f"{self._name} of {len(inputs[0])}"):
            results = torch.utils._pytree.tree_leaves(self._program(state, *given.values()))
        outputs = dict(zip(self._outputs, results, strict=True))
        for name, tensor in state.items():
            tensor.copy_(outputs.pop(f"{name}.out"))
        return list(outputs.values())


def open_eagerly(folder: Path, manifest: Manifest) -> Opener:
    def on(device: str, peers: torch.Tensor | None = None) -> Callable[[str], EagerPackage]:
        weights = load_file(folder / WEIGHTS)
        return lambda name: EagerPackage(folder, name, weights, peers)

    return on


def fake_gpu(index: int) -> Any:
    assert str(index) == os.environ.get("RANK", "0"), "all are on one machine here"
    if str(index) == os.environ.get(TAKEN):
        raise EngineError(f"GPU {index} is taken")
    return RankGpu()


def visible_gpus() -> int:
    return int(os.environ.get(GPUS, "2"))


def load(
    folder: Path,
    manifest: Manifest,
    threads: int | None,
    channel: Channel | None = None,
    **options: bool,
) -> Programs:
    """Stand in for target inductor's `load`."""
    from mtpbuild.runtime.programs.inductor import load as load_inductor

    machine = {"open_programs": open_eagerly, "find_gpu": fake_gpu, "peers": GlooPeers}
    return load_inductor(folder, manifest, threads, channel, **options, **machine)  # type: ignore[arg-type]


@contextlib.contextmanager
def target() -> Iterator[None]:
    """Load engines this way in this process, while the block runs."""
    with registered("inductor", programs="tests.support.eager_ranks"):
        yield


@contextlib.contextmanager
def used() -> Iterator[pytest.MonkeyPatch]:
    """Load engines this way, also in the processes that this one starts, while the block runs."""
    assert mtpbuild.plugins.rope
    with target(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_cuda, "visible_gpus", visible_gpus)
        patch.setattr(ranks, "FOLLOWER", (sys.executable, "-m", "tests.support.eager_ranks"))
        patch.setenv("PYTHONPATH", str(ROOT))
        yield patch


@contextlib.contextmanager
def in_place_of_the_compiler() -> Iterator[None]:
    """Build and load engines this way while the block runs."""
    from tests.support.fake_target import in_place_of

    torch.set_num_threads(1)
    with in_place_of("inductor", lower=lower), used() as patch:
        patch.setenv(ranks.TIMEOUT, "30")
        yield


@contextlib.contextmanager
def on_gpus() -> Iterator[None]:
    """Do the same, and let builds with --device cuda find a GPU."""
    from tests.support.fake_target import in_place_of

    with (
        in_place_of_the_compiler(),
        in_place_of("inductor", compute_capabilities=lambda request: ("9.0",)),
    ):
        yield


if __name__ == "__main__":
    torch.set_num_threads(1)
    with target(), rank_bugs.planted():
        sys.exit(follow.run_follower(*sys.argv[1:]))
