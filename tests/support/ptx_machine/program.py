"""Parses PTX into instructions: names, operands, guards, and targets of branches."""

import re
from dataclasses import dataclass
from typing import NamedTuple


class Register(NamedTuple):
    """A register, or a special one such as %tid.x."""

    name: str


class Immediate(NamedTuple):
    """A constant by its bits; an instruction takes as many of them as its type has."""

    bits: int


class Symbol(NamedTuple):
    """A parameter, a label, or the shared memory."""

    name: str


class Address(NamedTuple):
    base: Register | Symbol
    offset: int


Scalar = Register | Immediate | Symbol


class Vector(NamedTuple):
    """A row of values, the parts of a register, or a result and a predicate."""

    parts: tuple[Scalar, ...]


Operand = Scalar | Address | Vector


@dataclass(frozen=True)
class Instruction:
    """An instruction; `guard`: a predicate, and the value with which threads execute it."""

    guard: tuple[Register, bool] | None
    name: tuple[str, ...]  # such as ("setp", "lt", "s32")
    operands: tuple[Operand, ...]
    text: str


@dataclass(frozen=True)
class Program:
    instructions: list[Instruction]
    labels: dict[str, int]  # the number of the instruction after each
    widths: dict[str, int]  # bits of registers, 1 for predicates, by name or by prefix
    local: int  # bytes of each thread's own memory


REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)")
LOCAL = re.compile(r"\.local .*\b__local_depot\w*\[(\d+)\]")
GUARD = re.compile(r"@(!?)(%?\w+)\s+(.*)", re.DOTALL)
OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
NUMBER = re.compile(r"(-?)(0[xX][0-9a-fA-F]+|\d+)U?$")


def parse(text: str) -> Program:
    """Parse a function's body, or inline assembly."""
    body = re.sub(r"//[^\n]*", "", _body(text))
    body = re.sub(r"^\s*\.(loc|file|pragma)\b[^\n]*", "", body, flags=re.MULTILINE)
    found, labels, widths, local = list[Instruction](), dict[str, int](), dict[str, int](), 0
    for line in re.sub(r"^(\s*\$\w+):", r"\1:;", body, flags=re.MULTILINE).split(";"):
        statement = re.sub(r"^([{}\s]+)", "", line).strip()
        statement = statement.removesuffix("}").strip() if "{" not in statement else statement
        if not statement:
            continue
        if statement.endswith(":"):
            labels[statement[:-1]] = len(found)
        elif declared := REGISTERS.match(statement):
            bits = 1 if declared[1] == "pred" else int(declared[1][1:])
            names = (name.strip().partition("<")[0] for name in declared[2].split(","))
            widths |= dict.fromkeys(names, bits)
        elif own := LOCAL.match(statement):
            local = int(own[1])
        elif not statement.startswith("."):
            found.append(_instruction(statement))
    return Program(found, labels, widths, local)


def _body(text: str) -> str:
    """Return the text within the function's braces; debug information surrounds it."""
    begin = text.index("{", max(text.find(".entry"), 0))
    depth = 0
    for brace in re.compile(r"[{}]").finditer(text, begin):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[begin + 1 : brace.start()]
    raise ValueError("a brace is not closed")


def _instruction(statement: str) -> Instruction:
    text, guard = " ".join(statement.split()), None
    rest = text
    if guarded := GUARD.match(text):
        guard, rest = (Register(guarded[2]), not guarded[1]), guarded[3]
    name, _, rest = rest.partition(" ")
    operands = tuple(_operand(each.strip()) for each in OPERANDS.findall(rest))
    return Instruction(guard, tuple(name.split(".")), operands, text)


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return Vector(tuple(_scalar(each.strip()) for each in text[1:-1].split(",")))
    if text.startswith("["):
        base, _, offset = text[1:-1].replace(" ", "").partition("+")
        named = _scalar(base)
        assert not isinstance(named, Immediate), text
        return Address(named, int(offset or "0", 0))
    if "|" in text:  # a result and a predicate
        return Vector(tuple(_scalar(each) for each in text.split("|")))
    return _scalar(text)


def _scalar(text: str) -> Scalar:
    if number := NUMBER.match(text):
        return Immediate(int(number[1] + "1") * int(number[2], 0))
    if text.startswith("0f"):
        return Immediate(int(text[2:], 16))
    named = ("_param_" in text, text.startswith("$L"), text.startswith("__local"))
    return Symbol(text) if any(named) or text == "global_smem" else Register(text)
