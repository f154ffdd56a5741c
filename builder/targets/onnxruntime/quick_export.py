"""Have torch.onnx do once what it does anew for each program: a fifth of a build's time.

The names that are replaced are private to PyTorch. Where a version lacks them this module fails,
and tests of engines fail with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node
from torch.onnx._internal.exporter import _registration
from torch.onnx._internal.fx.passes import type_promotion

from mtpbuild.builder.overrides import override_attribute


@contextmanager
def export_quickly() -> Iterator[None]:
    """Within it, torch.onnx reads its translations once, and takes the program as it was traced.

    To decompose operators it would trace the program again, though `torch_passes` has rewritten
    those. Its type promotion runs each node again on fake tensors, though the trace has left their
    values in `meta`. Nodes that it changes are still run.
    """
    interpreter: Any = type_promotion._TypePromotionInterpreter
    with (
        override_attribute(ExportedProgram, "run_decompositions", lambda exported, *_: exported),
        override_attribute(interpreter, "run_node", _promote),
        override_attribute(
            _registration.ONNXRegistry, "from_torchlib", staticmethod(_copy_registry)
        ),
    ):
        yield


def _promote(interpreter: Any, node: Node) -> Any:
    """Insert the casts of a node's operands; return the node's value."""
    with interpreter._set_current_node(node):
        rule = type_promotion.get_type_promotion_rule(node, interpreter.type_promotion_table)
        if rule:
            interpreter._maybe_promote_node(node, rule)
    if node.op == "call_function" and "val" in node.meta:
        return node.meta["val"]
    return super(type(interpreter), interpreter).run_node(node)


def _copy_registry(opset_version: int) -> _registration.ONNXRegistry:
    """Return a registry that one export may add translations to."""
    registry = copy(_registry(opset_version))
    registry.functions = {name: [*functions] for name, functions in registry.functions.items()}
    return registry


_registry = cache(_registration.ONNXRegistry.from_torchlib)
