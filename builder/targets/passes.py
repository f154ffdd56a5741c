"""Passes: functions that rewrite a graph before a target compiles it.

A `Pass` takes the graph and its `TracedProgram`, and returns the graph, rewritten in place or anew.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mtpbuild.builder.graph.pipeline import Pass
from mtpbuild.runtime.errors import BuildError

if TYPE_CHECKING:
    from mtpbuild.builder.program.trace import TracedProgram


class Dump:
    """A folder for the text of each program's graph after each pass, in numbered files."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._counts = folder, dict[str, Iterator[int]]()

    def write(self, program: str, stage: str, graph: Any) -> None:
        """Write a graph as a file such as decode.03.fold_constants.txt; raise BuildError."""
        number = next(self._counts.setdefault(program, count()))
        path = self._folder / f"{program}.{number:02}.{stage}.txt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_text(as_text(graph), encoding="utf-8")
        except OSError as error:
            raise BuildError(f"--dump: {path} can't be written ({error.strerror})") from None


DUMP = ContextVar[Dump | None]("DUMP", default=None)


@contextmanager
def dump_to(folder: Path | None) -> Iterator[None]:
    """Dump graphs to a folder while the block runs, unless the folder is None."""
    token = DUMP.set(None if folder is None else Dump(folder))
    try:
        yield
    finally:
        DUMP.reset(token)


def dump_graph(program: str, stage: str, graph: Any) -> None:
    """Write a graph if the build dumps graphs."""
    if (dump := DUMP.get()) is not None:
        dump.write(program, stage, graph)


def run_passes(passes: Sequence[Pass], graph: Any, traced: "TracedProgram") -> Any:
    """Rewrite a graph by passes, in order; return the graph."""
    for rewrite in passes:
        graph = rewrite(graph, traced)
        dump_graph(traced.name, rewrite.name, graph)
    return graph


def as_text(graph: Any) -> str:
    """Write a graph as text, a line for each node."""
    if isinstance(graph, torch.export.ExportedProgram):
        graph = graph.graph_module
    if isinstance(graph, torch.fx.GraphModule):
        text: str = graph.print_readable(print_output=False)
        return text
    return "\n".join(map(str, graph.graph)) + "\n"  # ONNX
