"""A model without a weight in memory: what `build --dry-run` looks at beyond names and flags."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mtpbuild.builder.checkpoint.tensors import Checkpoint, joined, stream_pieces
from mtpbuild.builder.checkpoint.write import TYPES
from mtpbuild.builder.garbage import no_garbage_collection
from mtpbuild.builder.model_source import ModelSource
from mtpbuild.builder.models.common.weights import Share
from mtpbuild.builder.plan import Plan
from mtpbuild.builder.program.programs import Program
from mtpbuild.builder.program.trace import Traced
from mtpbuild.builder.quantize.formats import Shape
from mtpbuild.builder.step_counts import Counts, counted
from mtpbuild.runtime.errors import BuildError


@dataclass(frozen=True)
class Shapes(Checkpoint):
    """A checkpoint whose tensors have no values; sources: shapes as the table demands them."""

    sources: Mapping[str, Shape]

    def read(self, name: str) -> Tensor:
        return torch.empty(self.sources[name], device="meta")

    def parts(self, name: str) -> dict[str, Tensor]:
        format = self.format(name)
        assert format is not None
        parts = {suffix: self.tensors[name + suffix] for suffix in format.parts((1, 1))}
        return {
            suffix: torch.empty(part.shape, dtype=TYPES[part.dtype], device="meta")
            for suffix, part in parts.items()
        }


def check_slices(model: ModelSource, ranks: Iterable[int]) -> None:
    """Cut and join shapes as each rank's weights are; raises BuildError unless the program's fit.

    The error names the first weight of another shape.
    """
    wanted = {name: weight.shape for name, weight in model.model.named_parameters()}
    sources = {source.name: source.shape for weight in model.table for source in weight.sources}
    checkpoint = Shapes(model.checkpoint.folder, model.checkpoint.tensors, sources)
    for rank in ranks:
        share, table = Share(model.ranks, rank), model.weight_table(rank)
        for name, weight in joined(stream_pieces(checkpoint, table, model.kept, share)):
            if weight.shape != wanted[name]:
                is_to_be = f"{name} is {[*weight.shape]}, the program's {[*wanted[name]]}"
                raise BuildError(f"rank {rank}: {is_to_be}")


def export(
    model: ModelSource, plans: Iterable[Plan], trace: Callable[[Program, Plan], Traced]
) -> list[dict[str, Counts]]:
    """Export each plan's programs on tensors that only have shapes -> what each graph counts.

    The model, which is on the meta device, is of no use afterwards.
    """

    def count(plan: Plan) -> dict[str, Counts]:
        traced = (trace(program, plan) for program in model.programs(plan))
        return {each.name: counted(each) for each in traced}

    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()), no_garbage_collection():
        model.model.to_empty(device="cpu")
        return [count(plan) for plan in plans]
