"""How each kind of graph is compiled: the ops that it keeps, and the passes that rewrite it.

Layers call ops alone. A graph keeps an op if its pipeline names a facet for it. Otherwise the op is
traced through, and the operators of its reference stand in the graph. Passes rewrite the traced
program. The lowering turns it into the graph of its compiler, where each op becomes its facet, and
more passes rewrite that graph. `mtpbuild build --dump` writes the graph after each pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

PASSES = "mtpbuild.builder.targets.passes"


@dataclass(frozen=True)
class Pass:
    """A function of a module in `builder/targets/passes`, imported at its first use for torch."""

    file: str
    name: str

    @property
    def module(self) -> str:
        return f"{PASSES}.{self.file}"

    def __call__(self, graph: Any, traced: Any) -> Any:
        """Return the graph of a `TracedProgram`, rewritten in place or anew."""
        return getattr(import_module(self.module), self.name)(graph, traced)


@dataclass(frozen=True)
class Pipeline:
    """The ops that graphs keep, and the passes that rewrite the graphs, in order."""

    ops: Mapping[str, str] = field(default_factory=dict)  # op -> file of its facet (plugins.facet)
    step_ops: Mapping[str, str] = field(default_factory=dict)  # ops that only steps keep
    passes: tuple[Pass, ...] = ()  # over the traced program
    lowered_passes: tuple[Pass, ...] = ()  # over the graph that the lowering makes
    cpu_library: bool = False  # ops with an operator in the CPU's library are kept, too
    # Latent attention of prompts first expands all rows to keys and values, which is faster for
    # many tokens. The CPU's library has kernels for latents alone.
    expands_prompts: bool = True
    fixed_sizes: bool = False  # TensorRT's plugins get sizes as numbers, not as symbols

    @property
    def modules(self) -> list[str]:
        """The modules of the passes."""
        return [*dict.fromkeys(p.module for p in (*self.passes, *self.lowered_passes))]

    @property
    def facets(self) -> dict[str, str]:
        """All ops that some program keeps, each with the file of its facet."""
        return {**self.ops, **self.step_ops}


# The default, also for other packages' targets: PyTorch's operators alone.
PLAIN = Pipeline()

# Target onnxruntime with --portable, and tensorrt-rtx: standard operators of ONNX.
PORTABLE = Pipeline(
    ops=dict.fromkeys(
        (
            *("accept_rewind", "causal_conv", "choose_rows", "delta_advance", "delta_rule"),
            *("experts", "grouped_attention", "index_keys", "kv_write", "last_inputs"),
            *("mla_attention", "rope", "take_rows"),
        ),
        "onnx",
    ),
    passes=(Pass("torch_graph", "write_plainly"),),
    lowered_passes=(
        Pass("onnx_graph", "inline_functions"),
        Pass("onnx_graph", "fold_constants"),
        Pass("onnx_graph", "share_sizes"),
        Pass("onnx_graph", "merge_equal_nodes"),
        Pass("onnx_graph", "tidy"),
    ),
)

# Target onnxruntime: operators of the CPU's library, and standard ones between them.
CPU = Pipeline(
    ops=dict.fromkeys(("experts", "kv_write", "rope"), "onnx"),
    passes=PORTABLE.passes,
    lowered_passes=(
        *PORTABLE.lowered_passes,
        Pass("cpu_graph", "fuse_neighbours"),
        Pass("chains", "join_chains"),
    ),
    cpu_library=True,
    expands_prompts=False,
)

# Target inductor on a CPU: PyTorch's operators.
INDUCTOR = Pipeline(
    ops=dict.fromkeys(("delta_rule", "grouped_attention", "mla_attention"), "inductor"),
    lowered_passes=(Pass("in_place", "update_in_place"),),
)

# Target inductor on a GPU: launches of our Triton kernels between PyTorch's operators. A kernel's
# operands are copied, so PyTorch's operators write caches; `in_place` exempts mla_rows_write.
INDUCTOR_CUDA = Pipeline(
    ops=dict.fromkeys(
        (
            *("accept_best", "accept_mixed", "accept_rewind", "best_of_blocks", "choose_rows"),
            *("gated_product", "matmul_scaled", "matmul_wide"),
            *("mla_attention", "mla_queries", "mla_rows", "mla_rows_write", "mla_values"),
            *("moe", "moe_route", "rotary_rows", "shaped_probs", "sum_of_ranks"),
        ),
        "triton",
    ),
    passes=(Pass("one_shot", "sum_through_shared_memory"),),
    lowered_passes=(
        Pass("gpu_graph", "compute_both_branches"),
        Pass("gpu_graph", "move_to_gpu"),
        Pass("gpu_graph", "launch_kernels"),
        Pass("gpu_graph", "sum_parts_in_readers"),
        Pass("in_place", "update_in_place"),
    ),
)

# Target tensorrt: our kernels as plugins between TensorRT's layers.
TENSORRT = Pipeline(
    ops={
        **dict.fromkeys(("kv_write", "matmul_scaled"), "tensorrt"),
        **dict.fromkeys(("matmul_wide", "moe"), "plugins"),  # moe gets a chunk in padded pieces
    },
    step_ops=dict.fromkeys(
        (
            *("accept_best", "accept_mixed", "accept_rewind", "best_of_blocks", "gated_product"),
            *("mla_attention", "mla_queries", "mla_rows", "mla_values", "moe_route"),
            *("rotary_rows", "shaped_probs"),
        ),
        "plugins",
    ),
    lowered_passes=(Pass("tensorrt_graph", "decompose"),),
    fixed_sizes=True,
)
