"""The definition of an op, from which its registrations are made.

The signature of an op's reference is its specification: tensors, tensors that may be missing, and
numbers. `define` adds the shapes and types of the results and, if the CPU's library has an operator
for the op, its node. The PyTorch op, its fake kernel, its ONNX node and its GPU launches take their
operands from the signature, by name.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef


@dataclass(frozen=True)
class Node:
    """An operator of the CPU's library that computes an op.

    Its inputs are the op's tensors and its attributes the op's numbers, in the op's order.
    """

    name: str
    renamed: Mapping[str, str] = field(default_factory=dict)  # number -> attribute
    # Computes further attributes from the operands by name.
    attributes: Callable[[Mapping[str, Any]], Mapping[str, float]] = lambda known: {}
    sizes: tuple[str, ...] = ()  # numbers that are inputs, not attributes
    typed: str = ""  # the tensor whose type is a part of the operator's name, unless it is fp32


@dataclass(frozen=True)
class KeptOps:
    """The names of the ops that traced graphs keep; None: of all ops."""

    names: Container[str] | None = None
    padded_tokens: int | None = None  # tokens of a kernel that takes no symbolic number of them


KEPT = ContextVar("KEPT", default=KeptOps())  # noqa: B039  # it is frozen


@contextmanager
def keep(names: Container[str], *, padded_tokens: int | None = None) -> Iterator[None]:
    """Make graphs that are traced inside the `with` block keep only the ops of these names."""
    token = KEPT.set(KeptOps(names, padded_tokens))
    try:
        yield
    finally:
        KEPT.reset(token)


class Op(CustomOpDef):
    """An op of step programs: a node in graphs that keep it; in others its reference is traced."""

    fits: Callable[..., bool] | None = None  # whether kernels take these operands; None: always

    def __call__(self, *operands: Any, **named: Any) -> Any:
        if self.is_kept and (self.fits is None or self.fits(*operands, **named)):
            return self._opoverload(*operands, **named)
        return self._init_fn(*operands, **named)

    @property
    def is_kept(self) -> bool:
        """Whether the graph that is being traced keeps the op."""
        names = KEPT.get().names
        return names is None or self._name in names


EMPTY_RESULTS: dict[CustomOpDef, Callable[..., Any]] = {}  # in the order of definition
NODES: dict[CustomOpDef, Node] = {}


def define(
    empty: Callable[..., Any],
    node: Node | None = None,
    fits: Callable[..., bool] | None = None,
) -> Callable[[Callable[..., Any]], Op]:
    """Register a reference as the op of its name.

    empty: returns empty tensors like the results; its parameters name the operands that it needs.
    fits: returns whether kernels take the operands; if not, graphs get the reference's operators.
    """

    def register(reference: Callable[..., Any]) -> Op:
        name = reference.__name__.removesuffix("_op")
        schema = torch.library.infer_schema(reference, mutates_args=())
        op = Op("mtpbuild", name, schema, reference)
        op.register_kernel(None)(reference)
        op.fits = fits
        EMPTY_RESULTS[op] = empty
        if node is not None:
            NODES[op] = node
        op.register_fake(lambda *operands, **named: empty_results(op, bind(op, operands, named)))
        return op

    return register


def bind(
    op: CustomOpDef, operands: Sequence[Any], named: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return an op's operands by the reference's parameter names, with its defaults."""
    bound = signature(op._init_fn).bind(*operands, **named or {})
    bound.apply_defaults()
    return bound.arguments


def empty_results(op: CustomOpDef, known: Mapping[str, Any]) -> Any:
    """Return empty tensors like the op's results; known: its operands by name."""
    empty = EMPTY_RESULTS[op]
    return empty(**{name: known[name] for name in signature(empty).parameters})
