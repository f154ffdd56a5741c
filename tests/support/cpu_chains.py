"""Takes the chains of the CPU's library apart, into the nodes that they were made of."""

import struct

import onnx
from onnx import helper

from mtpbuild.builder.targets.onnxruntime.chains import CHAIN

FLOATS = ("epsilon", "factor", "scale")  # attributes that a chain holds as their bits


def apart(graph: onnx.GraphProto) -> None:
    """Replace each chain of a graph by its steps."""
    nodes = [step for node in graph.node for step in _steps(node)]
    del graph.node[:]
    graph.node.extend(nodes)


def _steps(chain: onnx.NodeProto) -> list[onnx.NodeProto]:
    if chain.op_type != CHAIN:
        return [chain]
    how = {each.name: helper.get_attribute_value(each) for each in chain.attribute}
    names = {str(number): name for number, name in enumerate(chain.input)}
    names |= dict(zip(how["results"].decode().split(), chain.output, strict=True))
    steps = (line.split() for line in how["steps"].decode().splitlines())
    return [_node(step, names, chain.output[0]) for step in steps]


def _node(words: list[str], names: dict[str, str], chain: str) -> onnx.NodeProto:
    arrow = words.index(">")
    values = [word for word in words if "=" not in word]
    for place, word in enumerate(values[arrow + 1 :], start=arrow + 1):
        if word == "-":  # a node's own results have names, read or not
            values[place] = f"unread{len(names)}"
            names[values[place]] = f"{chain}.{values[place]}"
    operands, results = (
        ["" if word == "-" else names.setdefault(word, f"{chain}.{word}") for word in part]
        for part in (values[1:arrow], values[arrow + 1 :])
    )
    given = (word.split("=") for word in words if "=" in word)
    how = {name: _number(name, int(value)) for name, value in given}
    return helper.make_node(words[0], operands, results, domain="mtpbuild", **how)


def _number(name: str, value: int) -> int | float:
    if name not in FLOATS:
        return value
    (number,) = struct.unpack("<f", struct.pack("<I", value))
    return float(number)
