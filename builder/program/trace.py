"""Export programs by torch.export; sizes that vary between calls stay symbolic."""

from dataclasses import dataclass

import torch
from torch.export import Dim, ExportedProgram
from torch.fx import config as fx_config
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from mtpbuild.builder.models import find_family_of
from mtpbuild.builder.overrides import override_attribute
from mtpbuild.builder.plan.plan import Plan, make_state_specs
from mtpbuild.builder.program.programs import EXAMPLE_BATCH, SCORES, Program, max_chunk_tokens
from mtpbuild.plugins import NODE_FACETS
from mtpbuild.plugins.definition import keep
from mtpbuild.runtime.contract.manifest import ProgramSpec, TensorSpec
from mtpbuild.runtime.contract.programs import HIDDEN

Specs = tuple[TensorSpec, ...]
# Inputs and outputs of programs of prompts that have an entry per token of the chunk.
CHUNKED = ("tokens", "following", HIDDEN, *SCORES)


@dataclass(frozen=True)
class TracedProgram:
    """An exported program, and the specs of its inputs and outputs in order."""

    name: str
    exported: ExportedProgram
    inputs: Specs
    outputs: Specs
    plan: Plan
    rank: int = 0  # the rank to lower the program for, if programs hold weights

    @property
    def of_prompt(self) -> bool:
        """Whether the program takes a chunk of a prompt, whose length varies."""
        return any(spec.name == "start" for spec in self.inputs)

    def spec(self, file: str, temporary: int = 0) -> ProgramSpec:
        specs = {"inputs": self.inputs, "outputs": self.outputs}
        return ProgramSpec(file=file, temporary=temporary, **specs)


def trace(program: Program, plan: Plan) -> TracedProgram:
    """Export a program as one graph.

    The sizes that vary are `rows` (the cache rows in use), the `chunk` of a prefill, and the
    `batch` of a decode step if there is more than one slot. If programs take all slots only the
    chunk varies, and a GPU's decode steps take the caches whole.
    """
    least = max(2 * plan.window, 3 * find_family_of(plan.config).row_step(plan.config)) + 2
    rows = Dim("rows", min=least, max=plan.capacity)
    chunk = Dim("chunk", min=1, max=max_chunk_tokens(plan))
    batch = Dim("batch", min=1, max=max(plan.max_batch, EXAMPLE_BATCH))
    slots = {0: batch} if program.batch > 1 and not plan.style.all_slots else {}
    state, state_dims = {}, {}
    for spec in (s for s in make_state_specs(plan) if s.name in program.state):
        sizes, state_dims[spec.name] = spec.sizes | {"batch": program.batch}, dict(slots)
        if spec.role == "rows" and not program.whole:
            sizes["rows"] = least  # an example: caches at full capacity would take much memory
            state_dims[spec.name][list(sizes).index("rows")] = rows
        state[spec.name] = torch.zeros(*sizes.values(), dtype=getattr(torch, spec.dtype))
    argument_dims = dict.fromkeys(program.arguments, slots)
    if "start" in program.arguments:
        argument_dims |= {name: {1: chunk} for name in CHUNKED if name in program.arguments}
    pipeline = plan.style.pipeline
    kept = {*(pipeline.ops if "start" in program.arguments else pipeline.facets)}
    if pipeline.cpu_library:
        kept |= NODE_FACETS.keys()
    # Nobody reads where in the source a node was made; finding it is a seventh of a trace.
    no_places = override_attribute(fx_config, "do_not_emit_stack_traces", True)
    with (
        torch.no_grad(),
        no_places,
        _use_lazy_graph_module(True),
        keep(kept, padded_tokens=pipeline.padded_tokens),
    ):
        exported = torch.export.export(
            program.module,
            (state, *program.arguments.values()),
            dynamic_shapes=(state_dims, *(argument_dims[name] for name in program.arguments)),
        )
    values = {node.name: node.meta.get("val") for node in exported.graph.nodes}
    signature = exported.graph_signature
    names = (*program.state, *program.arguments)
    inputs = tuple(map(_make_spec, names, (values[name] for name in signature.user_inputs)))
    outputs = tuple(
        map(_make_spec, program.outputs, (values[name] for name in signature.user_outputs))
    )
    return TracedProgram(program.name, exported, inputs, outputs, plan)


def _make_spec(name: str, value: torch.Tensor) -> TensorSpec:
    # A size that varies is a symbol: first `batch`, then `rows` of caches or `chunk` of prompts.
    symbols = ("batch", *("chunk" if name in CHUNKED else "rows" for _ in value.shape[1:]))
    sizes = zip(value.shape, symbols, strict=True)
    shape = tuple(int(d) if isinstance(d, int) else symbol for d, symbol in sizes)
    dtype = str(value.dtype).removeprefix("torch.")
    return TensorSpec(name=name, dtype=dtype, shape=shape)  # type: ignore[arg-type]
