"""A model without weights in memory, for the checks of `build --dry-run` that need its graphs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mtpbuild.builder.compiler.step_counts import StepCounts, count_step_calls, temporary_bytes
from mtpbuild.builder.formats import Shape
from mtpbuild.builder.garbage import no_garbage_collection
from mtpbuild.builder.models.common.weight import Share, convert_weights, join_slices
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.program.opened_model import OpenedModel
from mtpbuild.builder.program.programs import Program, make_programs
from mtpbuild.builder.program.trace import Traced
from mtpbuild.builder.weights.stored import Checkpoint
from mtpbuild.runtime.errors import BuildError


@dataclass(frozen=True)
class WeightlessCheckpoint(Checkpoint):
    """A checkpoint whose tensors have shapes but no values; shapes: of weights, from the table."""

    shapes: Mapping[str, Shape]

    def read(self, name: str) -> Tensor:
        return torch.empty(self.shapes[name], device="meta")

    def parts(self, name: str) -> dict[str, Tensor]:
        format = self.format(name)
        assert format is not None
        parts = {suffix: self.tensors[name + suffix] for suffix in format.suffixes}
        return {
            suffix: torch.empty(entry.shape, dtype=entry.type, device="meta")
            for suffix, entry in parts.items()
        }


def check_slices(model: OpenedModel, ranks: Iterable[int]) -> None:
    """Cut and join the weights' shapes for each rank; raise BuildError if the programs' differ.

    The error names the first weight that differs.
    """
    wanted = {name: weight.shape for name, weight in model.model.named_parameters()}
    shapes = {name: stored.shape for name, stored in model.table.stored.items()}
    of = model.checkpoint
    checkpoint = WeightlessCheckpoint(
        of.folder, of.tensors, of.tower, of.settings, shapes, joined=of.joined
    )
    for rank in ranks:
        share, table = Share(model.ranks, rank), model.table.of_rank(rank)
        for name, weight in join_slices(convert_weights(checkpoint, table, share)):
            if weight.shape != wanted[name]:
                differs = f"{name} is {[*weight.shape]}, the program's {[*wanted[name]]}"
                raise BuildError(f"rank {rank}: {differs}")


def export(
    model: OpenedModel, plans: Iterable[Plan], trace: Callable[[Program, Plan], Traced]
) -> list[dict[str, StepCounts]]:
    """Export each plan's programs on tensors that only have shapes; return each graph's counts.

    The model must be on the meta device, and can't be used afterwards.
    """

    def count(plan: Plan) -> dict[str, StepCounts]:
        traced = (trace(program, plan) for program in make_programs(plan, model.model))
        return {each.name: count_step_calls(each, temporary_bytes(each)) for each in traced}

    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()), no_garbage_collection():
        model.model.to_empty(device="cpu")
        return [count(plan) for plan in plans]
