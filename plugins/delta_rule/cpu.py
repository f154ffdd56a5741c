"""delta_rule and delta_advance as operators of the CPU's library."""

from typing import Any

from mtpbuild.plugins.contrib import BOOLS, FLOATS, INTS
from mtpbuild.plugins.cpu.onnx import operator

OPERANDS = dict.fromkeys(("mixed", "ba", "rate", "bias", "state"), FLOATS)
BEGINS = {"begins": BOOLS}  # added by the pass `FuseAround`
DeltaRule = operator(
    "DeltaRule", OPERANDS | BEGINS, {"keeps": 1}, optional=BEGINS, outputs=(FLOATS, FLOATS)
)
DeltaAdvance = operator("DeltaAdvance", OPERANDS | {"n": INTS} | BEGINS, optional=BEGINS)


def delta_rule_cpu(mixed: Any, ba: Any, rate: Any, bias: Any, state: Any) -> Any:
    """Emit one node; `FuseAround` drops its second result if it is not used."""
    return DeltaRule(mixed, ba, rate, bias, state, keeps=1)


def delta_advance_cpu(mixed: Any, ba: Any, rate: Any, bias: Any, state: Any, n: Any) -> Any:
    return DeltaAdvance(mixed, ba, rate, bias, state, n)
