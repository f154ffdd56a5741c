"""Target inductor without its compiler: programs run eagerly, from their exported graphs.

All else of an engine of several ranks is real: weights, processes, torch.distributed; but for GPUs,
which are `FakeGpu`s that gloo connects. Compiling one takes a minute of a core.
`python -m tests.support.eager_ranks` is a rank that another process started.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

import mtpbuild.plugins  # the graphs' ops
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.group import nccl
from mtpbuild.runtime.group import start as ranks
from mtpbuild.runtime.manifest import read_manifest
from mtpbuild.runtime.programs import inductor, inductor_cuda
from tests.support.fake_gpu import FakeGpu

if TYPE_CHECKING:
    from mtpbuild.builder.program.trace import Traced
    from mtpbuild.builder.weights_file import Placed

ROOT = Path(__file__).parents[2]


def lower(traced: "Traced", weights: "Mapping[str, Placed]", folder: Path) -> str:
    from mtpbuild.builder.targets.lower_inductor import _write_constants

    file = f"{traced.name}.pt2"
    torch.export.save(traced.exported, folder / file)
    _write_constants(traced, weights, folder)
    return file


class EagerPackage:
    """Stands in for `Package`: runs a program and copies the new state over what came in."""

    def __init__(
        self, path: Path, weights: Mapping[str, torch.Tensor], device: str, rank: int = 0
    ) -> None:
        own = load_file(path.with_name(inductor.CONSTANTS.format(path.stem)))
        own |= {name: torch.tensor([rank]) for name in own if name.endswith(".rank")}
        named = {f"model.{name}": weight for name, weight in weights.items()} | own
        spec = read_manifest(path.parent).programs[path.stem]
        self._inputs, self._outputs = ([t.name for t in ts] for ts in (spec.inputs, spec.outputs))
        self._program = torch.export.load(path).module(check_guards=False)
        parameters = {name: named[name] for name, _ in self._program.named_parameters()}
        self._program.load_state_dict(parameters, strict=False, assign=True)

    @torch.no_grad()
    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        given = dict(zip(self._inputs, inputs, strict=True))
        state = {name: given.pop(name) for name in self._inputs if f"{name}.out" in self._outputs}
        results = torch.utils._pytree.tree_leaves(self._program(state, *given.values()))
        outputs = dict(zip(self._outputs, results, strict=True))
        for name, tensor in state.items():
            tensor.copy_(outputs.pop(f"{name}.out"))
        return list(outputs.values())


class GlooPeers(nccl.Peers):
    backend = "gloo"

    def failed(self) -> bool:
        return False


def fake_gpu(index: int) -> FakeGpu:
    if str(index) != os.environ["RANK"]:  # all are on one machine here
        raise EngineError(f"GPU {index} is another rank's")
    return FakeGpu()


def use(patch: pytest.MonkeyPatch) -> None:
    """Load engines this way, in this process and in those that it starts."""
    assert mtpbuild.plugins.rope
    patch.setattr(inductor, "Package", EagerPackage)
    patch.setattr(inductor_cuda, "Package", EagerPackage)
    patch.setattr(nccl, "Gpu", fake_gpu)
    patch.setattr(nccl, "Peers", GlooPeers)
    patch.setattr(ranks, "FOLLOWER", (sys.executable, "-m", "tests.support.eager_ranks"))
    patch.setenv("PYTHONPATH", str(ROOT))


@contextlib.contextmanager
def in_place_of_the_compiler() -> Iterator[None]:
    """Build and load engines this way while the block runs."""
    from tests.support.fake_target import in_place_of

    torch.set_num_threads(1)
    with in_place_of("inductor", lower=lower), pytest.MonkeyPatch.context() as patch:
        use(patch)
        patch.setenv(ranks.TIMEOUT, "30")
        yield


if __name__ == "__main__":
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        use(patch)
        sys.exit(ranks.main(*sys.argv[1:]))
