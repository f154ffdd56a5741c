"""How a kind of graph is compiled: the ops that it keeps, and the passes that rewrite it.

Layers call ops alone. A graph keeps an op if its pipeline names a facet for it. Otherwise the op is
traced through, and the operators of its reference stand in the graph. Passes rewrite the traced
program. The lowering turns it into the graph of its compiler, where each op becomes its facet, and
more passes rewrite that graph. `mtpbuild build --dump` writes the graph after each pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Pass:
    """A function that rewrites a graph; its module is imported at the first use, for torch."""

    module: str
    name: str

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
    # Kernels take a number of tokens that is known at the trace: a prompt's chunk is cut into
    # pieces of so many tokens, the last one padded. None: kernels take any number.
    padded_tokens: int | None = None

    @property
    def modules(self) -> list[str]:
        """The modules of the passes."""
        return [*dict.fromkeys(p.module for p in (*self.passes, *self.lowered_passes))]

    @property
    def facets(self) -> dict[str, str]:
        """All ops that some program keeps, each with the file of its facet."""
        return {**self.ops, **self.step_ops}


# The default, also for other packages' targets: PyTorch's operators alone.
TRACED_THROUGH = Pipeline()
