"""Join consecutive operators of the CPU's library into one node, a chain.

Before: a node for each operator. After: one node `Chain` for each run of them, with an attribute
that lists the steps. Results stay bit-identical, as each step computes what its node did.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import onnx_ir as ir

from mtpbuild.runtime.cpu_library import DOMAIN

if TYPE_CHECKING:
    from mtpbuild.builder.program.trace import TracedProgram

CHAIN = "Chain"


def join_chains(model: ir.Model, traced: "TracedProgram | None" = None) -> ir.Model:
    """Join runs of our operators; others run as early as they can, so that runs are long."""
    for run in [run for run in _find_runs(model.graph) if len(run) > 1]:
        _replace_by_chain(model.graph, run)
    model.graph.sort()
    return model


def _find_runs(graph: ir.Graph) -> Iterator[list[ir.Node]]:
    """Yield runs of our operators; the others that are ready are scheduled between two runs."""
    waiting, done, ours = [*graph], set[ir.Node](), False
    needs = {node: {*_find_producers(node, graph)} for node in waiting}
    while waiting:
        run = list[ir.Node]()
        for node in waiting:
            if (node.domain == DOMAIN) is ours and needs[node] <= done:
                done.add(node)
                run.append(node)
        waiting = [node for node in waiting if node not in done]
        if ours:
            yield run
        ours = not ours


def _find_producers(node: ir.Node, graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the nodes whose results a node or its branches read, from the graph itself."""
    inputs = list(node.inputs)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            inputs += [i for inner in attribute.as_graph().all_nodes() for i in inner.inputs]
    for value in inputs:
        producer = None if value is None else value.producer()
        if producer is not None and producer.graph is graph:
            yield producer


def _replace_by_chain(graph: ir.Graph, run: list[ir.Node]) -> None:
    nodes, outputs = {*run}, [value for node in run for value in node.outputs if value.name]
    made = [value for value in outputs if value.is_graph_output() or value.uses()]
    inputs = (value for node in run for value in node.inputs if value is not None)
    operands = [*dict.fromkeys(value for value in inputs if value.producer() not in nodes)]
    numbers = {value: number for number, value in enumerate([*operands, *made])}
    results = [
        value
        for value in made
        if value.is_graph_output() or any(use.node not in nodes for use in value.uses())
    ]
    steps = "\n".join(_step(node, numbers) for node in run)
    chain = ir.node(
        CHAIN,
        operands,
        {
            "operands": len(operands),
            "steps": steps,
            "results": " ".join(str(numbers[value]) for value in results),
        },
        domain=DOMAIN,
        num_outputs=len(results),
    )
    graph.insert_before(run[0], chain)
    for old, new in zip(results, chain.outputs, strict=True):
        new.name, new.type, new.shape = old.name, old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(run, safe=True)


def _step(node: ir.Node, numbers: dict[ir.Value, int]) -> str:
    """Write a step as the library parses it (plugins/cpu/source/chain.h)."""

    def named(values: Iterable[ir.Value | None]) -> list[str]:
        return ["-" if v is None or v not in numbers else str(numbers[v]) for v in values]

    settings = [f"{name}={_read_bits(attribute)}" for name, attribute in node.attributes.items()]
    return " ".join([node.op_type, *named(node.inputs), ">", *named(node.outputs), *settings])


def _read_bits(attribute: ir.Attr) -> int:
    if attribute.type == ir.AttributeType.INT:
        return attribute.as_int()
    (bits,) = struct.unpack("<I", struct.pack("<f", attribute.as_float()))
    return int(bits)
