"""Gives a step's attention to another package in a GPU's graph, where its kernel does the same."""

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from mtpbuild.builder.models import family_of
from mtpbuild.builder.targets.passes.gpu_graph import op_name
from mtpbuild.builder.targets.style import Attends
from mtpbuild.runtime.errors import BuildError
from mtpbuild.runtime.programs.attention_backends import PAGE, module_of

if TYPE_CHECKING:
    from mtpbuild.builder.models.config import ModelConfig
    from mtpbuild.builder.plan import Plan

aten = torch.ops.aten


@dataclass(frozen=True)
class Limits:
    """Says what a package has kernels for."""

    capabilities: tuple[str, ...]
    names: tuple[str, ...]  # of the sizes that its kernels fix
    shapes: tuple[tuple[int, ...], ...]
    any_heads: bool = False  # else up to 64 of a rank, or 128
    plans: bool = False  # the first call of a step does, for all layers


LATENT = ("kv_lora_rank", "qk_rope_head_dim")
LIMITS = {
    "flashinfer": Limits(  # its kernels for data-centre Blackwell
        ("10.0", "10.3"), (*LATENT, "qk_nope_head_dim"), ((512, 64, 128), (256, 64, 64))
    ),
    "flash-mla": Limits(("9.0",), LATENT, ((512, 64),), any_heads=True, plans=True),
}


def check(plan: "Plan", backend: str) -> None:
    """Raise BuildError unless the package has a kernel for the plan's model and GPU."""
    asked, config, limits = f"--attention-backend {backend}", plan.config, LIMITS[backend]
    attention = family_of(config).attention
    if attention is not Attends.LATENT:
        raise BuildError(f"{asked} has no kernel that we call for {attention}; leave it out")
    for capability in plan.compute_capabilities:
        if capability not in limits.capabilities:
            raise BuildError(
                f"{asked} has kernels for compute capability {' and '.join(limits.capabilities)} "
                f"alone, not {capability}; leave it out"
            )
    shape = tuple(getattr(config, name, None) for name in limits.names)
    if shape not in limits.shapes:
        known = " or ".join(", ".join(map(str, each)) for each in limits.shapes)
        raise BuildError(
            f"{asked} has kernels for a {', '.join(limits.names)} of {known}, not "
            f"{', '.join(map(str, shape))}; leave it out"
        )
    heads: int = config.num_attention_heads // plan.ranks.parts  # type: ignore[attr-defined]
    if heads > 64 and heads != 128 and not limits.any_heads:
        raise BuildError(
            f"{asked} has kernels for up to 64 heads of a rank, or 128, not {heads}; leave it out"
        )


def by_package(exported: ExportedProgram, config: "ModelConfig", backend: str) -> int:
    """Before: `mla_attention` over rows that the step has just written. After: a package's kernel.

    Works in place; returns how many it replaced. Drafts keep our kernel: they attend with a single
    token of a window, or to rows beside the cache.
    """
    decode, plans = module_of(backend).mla_decode._opoverload, LIMITS[backend].plans
    nope: int = config.qk_nope_head_dim  # type: ignore[attr-defined]  # a family with latents
    graph = exported.graph_module.graph
    found = [node for node in graph.nodes if reads_what_was_written(node)]

    def call(op: Any, *operands: Any, **options: Any) -> Node:
        made = graph.call_function(op, operands, options)
        values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in operands]
        made.meta["val"] = op(*values, **options)
        return made

    def by_the_other(rows: Node) -> Node:
        """Turns rows ordered by token into rows ordered by head, or the reverse."""
        turned = call(aten.permute.default, rows, [0, 2, 1, 3])
        return call(aten.clone.default, turned, memory_format=torch.contiguous_format)

    lengths: dict[Node, Node] = {}  # by base: all layers of a pass share them
    for node in found:
        q, cache, _, base, _, scale, rank = cast(tuple[Any, ...], node.args)
        assert cache.meta["val"].shape[2] % PAGE == 0, "a GPU's caches have whole pages"
        with graph.inserting_before(node):
            first = base not in lengths
            if first:
                end = call(aten.add.Tensor, base, q.meta["val"].shape[2])
                lengths[base] = call(aten._to_copy.default, end, dtype=torch.int32)
            query = by_the_other(q)
            own = first if plans else nope  # what only one of the packages is told
            mixed = call(decode, query, cache, lengths[base], scale, own, rank)
            by_head = by_the_other(mixed)
        node.replace_all_uses_with(by_head)
        graph.erase_node(node)
    assert not plans or len(lengths) <= 1, "one plan is kept for each number of slots"
    exported.graph_module.recompile()
    return len(found)


def reads_what_was_written(node: Node) -> bool:
    """Tells whether all fresh rows are cached behind `base`, and query t sees t + 1 of them."""
    if op_name(node) != "mtpbuild::mla_attention" or len(node.args) != 7:
        return False
    q, cache, fresh, base, first, *_ = cast(tuple[Any, ...], node.args)
    if q.meta["val"].shape[2] != fresh.meta["val"].shape[2]:
        return False
    write, place = source_of(cache, 2), source_of(base, 2)
    if write is None or place is None or op_name(write) != "mtpbuild::mla_rows_write":
        return False
    return bool(
        op_name(place) == "mtpbuild::rotary_rows"
        and place.args[4] == 0
        and source_of(fresh, 1) is write
        and source_of(write.args[6], 3) is place
        and source_of(first, 4) is place
    )


def source_of(node: Any, result: int) -> Node | None:
    """Returns the op whose result of that number the node is."""
    if not isinstance(node, Node) or node.target is not operator.getitem:
        return None
    source, number = node.args
    return source if number == result and isinstance(source, Node) else None
