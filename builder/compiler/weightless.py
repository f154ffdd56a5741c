"""A model without weights in memory, for the checks of `build --dry-run` that need its graphs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mtpbuild.builder.compiler.temporary import count_temporary_bytes
from mtpbuild.builder.formats import Format, Shape
from mtpbuild.builder.garbage import pause_garbage_collection
from mtpbuild.builder.models.common.weight import Share, convert_weights, join_slices
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.program.opened_model import OpenedModel
from mtpbuild.builder.program.programs import Program, make_programs
from mtpbuild.builder.program.trace import TracedProgram
from mtpbuild.builder.stages import Watch
from mtpbuild.builder.weights.checkpoint import Checkpoint, choose_read_format
from mtpbuild.builder.weights.quantised_view import QuantisedView
from mtpbuild.runtime.errors import BuildError


@dataclass(frozen=True)
class GraphSize:
    """The number of a program's nodes, and the bytes of intermediate results held at once."""

    nodes: int
    temporary: int


@dataclass(frozen=True)
class WeightlessCheckpoint:
    """A checkpoint's weights with shapes, which are those of the table, but without values."""

    source: Checkpoint | QuantisedView
    shapes: Mapping[str, Shape]

    def read(self, name: str) -> Tensor:
        return torch.empty(self.shapes[name], device="meta")

    def read_engine_parts(self, name: str, engine_format: Format | None) -> dict[str, Tensor]:
        format = self.source.format(name)
        assert format is not None
        assert engine_format is not None
        parts = choose_read_format(format, engine_format).parts(self.shapes[name])
        return {
            suffix: torch.empty(entry.shape, dtype=entry.type, device="meta")
            for suffix, entry in parts.items()
        }


def check_slices(model: OpenedModel, ranks: Iterable[int], watch: Watch) -> None:
    """Cut and join the weights' shapes for each rank; raise BuildError if the programs' differ.

    The error names the first weight that differs. watch: is told of each weight.
    """
    wanted = {name: weight.shape for name, weight in model.model.named_parameters()}
    shapes = {name: stored.shape for name, stored in model.table.stored.items()}
    checkpoint = WeightlessCheckpoint(model.checkpoint, shapes)
    for rank in ranks:
        share, table = Share(model.ranks, rank), model.table.of_rank(rank)
        joined = join_slices(convert_weights(checkpoint, table, share))
        for number, (name, weight) in enumerate(joined, 1):
            watch(f"check checkpoint: rank {rank}, weight {number:,} of {len(wanted):,}")
            if weight.shape != wanted[name]:
                differs = f"{name} is {[*weight.shape]}, the program's {[*wanted[name]]}"
                raise BuildError(f"rank {rank}: {differs}")


def export(
    model: OpenedModel,
    plans: Iterable[Plan],
    trace: Callable[[Program, Plan], TracedProgram],
    watch: Watch,
) -> list[dict[str, GraphSize]]:
    """Export each plan's programs on tensors that only have shapes; return each graph's size.

    The model must be on the meta device, and can't be used afterwards. watch: is told of each
    program.
    """

    def count(plan: Plan) -> dict[str, GraphSize]:
        sizes = dict[str, GraphSize]()
        for program in make_programs(plan, model.model):
            watch(f"export {program.name}")
            traced = trace(program, plan)
            nodes = len(traced.exported.graph.nodes)
            sizes[program.name] = GraphSize(nodes, count_temporary_bytes(traced))
        return sizes

    with (
        FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()),
        pause_garbage_collection(),
    ):
        model.model.to_empty(device="cpu")
        return [count(plan) for plan in plans]
