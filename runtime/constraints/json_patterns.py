"""Patterns of JSON schemas in the syntax of Rust's regex crate, which llguidance uses."""

import re

LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"  # years
YEAR = "^0{0,3}[1-9]"  # no year 0
DAY = rf"^(?:.{{5}}(?:0[^2]|1.|02-(?:[01].|2[0-8]))|{LEAP}-02-29)"  # of months that are right
SECOND = r"[0-5].(?:\.[0-9]{1,6})?[Z+-]"  # no leap second
POINTER = "(?:/(?:[^/~]|~[01])*)*"
# The formats that are enforced; others are annotations. Each maps to llguidance's format, if it has
# one, and to the patterns that must match as well, as its own let through more.
FORMATS: dict[str, tuple[str | None, list[str]]] = {
    "date": ("date", [YEAR, DAY]),
    "time": ("time", [f"^.{{6}}{SECOND}"]),
    "date-time": ("date-time", [YEAR, DAY, f"^.{{10}}T.{{6}}{SECOND}"]),
    "hostname": ("hostname", ["^.{1,253}$"]),
    "email": ("email", [r"^[^@]{1,64}@[^.\[]{1,63}(?:\.[^.]{1,63})*$"]),
    "json-pointer": (None, [f"^{POINTER}$"]),
    "relative-json-pointer": (None, [f"^(?:0|[1-9][0-9]{{0,8}})(?:#|{POINTER})$"]),
    **{name: (name, []) for name in ("ipv4", "ipv6", "uuid", "uri", "duration")},
}
FORMATS |= {
    "idn-email": FORMATS["email"],
    "idn-hostname": FORMATS["hostname"],
    **dict.fromkeys(("uri-reference", "iri", "iri-reference"), FORMATS["uri"]),
}
SPACE = r"\t-\r\x20\xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
CLASSES = {"d": "0-9", "w": "0-9a-zA-Z_", "s": SPACE}
CONTROLS = {"n": 10, "r": 13, "t": 9, "v": 11, "f": 12, "0": 0}
CODE = re.compile(
    r"u\{([0-9a-fA-F]{1,6})\}|u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
    r"|u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|c([a-zA-Z])"
)
PROPERTY = re.compile(r"[pP](?:\{[^}]*\}|[A-Z])")
REPEAT = re.compile(r"\{\d+(?:,\d*)?\}")


def translate_pattern(pattern: str) -> str:
    """Translate an ECMAScript pattern to Rust's syntax; unknown escapes stay, to be refused later.

    No class contains the NUL character: if a class has all control characters, llguidance accepts
    an escaped `"` or backslash too.
    """
    pieces, at, quantified = list[str](), 0, False
    while at < len(pattern):
        char = pattern[at]
        if quantified and char == "?":  # a lazy quantifier matches the same texts
            at, quantified = at + 1, False
            continue
        quantified = False
        if char == "\\":
            piece, _, at = _read_escape(pattern, at + 1)
        elif char == "[":
            piece, at = _read_class(pattern, at + 1)
        elif char == "{" and (repeat := REPEAT.match(pattern, at)):
            piece, at, quantified = repeat[0], repeat.end(), True
        else:
            piece = {".": r"[^\n\r\x{2028}\x{2029}]", "{": r"\{", "}": r"\}"}.get(char, char)
            at, quantified = at + 1, char in "*+?" and pieces[-1:] != ["("]
        pieces.append(piece)
    return "".join(pieces)


def _read_class(pattern: str, at: int) -> tuple[str, int]:
    """Read a class after its opening bracket; return its translation and the end position."""
    negated, items = pattern.startswith("^", at), list[str]()
    at += negated
    while at < len(pattern) and pattern[at] != "]":
        item, code, at = _read_member(pattern, at)
        if code is not None and pattern.startswith("-", at) and pattern[at + 1 : at + 2] != "]":
            last, end, after = _read_member(pattern, at + 1)
            if end is not None:
                item, at = f"{item}-{last}", after
        items.append(item)
    inner = "".join(items) or r"&&a"  # an empty class has no members
    return f"[[{'^' * negated}{inner}]&&[^\\x00]]", at + 1


def _read_member(pattern: str, at: int) -> tuple[str, int | None, int]:
    if pattern[at] != "\\":
        return _write_char(ord(pattern[at])), ord(pattern[at]), at + 1
    if pattern.startswith("b", at + 1):
        return _write_char(8), 8, at + 2
    return _read_escape(pattern, at + 1)


def _read_escape(pattern: str, at: int) -> tuple[str, int | None, int]:
    """Read an escape after its backslash; return its translation, code and end position."""
    char = pattern[at : at + 1]
    if char.lower() in CLASSES and char:
        members = CLASSES[char.lower()]
        return (f"[{members}]" if char.islower() else f"[^\\x00{members}]"), None, at + 1
    if match := PROPERTY.match(pattern, at):
        return f"[\\{match[0]}&&[^\\x00]]", None, match.end()
    if match := CODE.match(pattern, at):
        long, high, low, four, two, control = match.groups()
        if control:
            code = ord(control) % 32
        elif high:
            code = 0x10000 + ((int(high, 16) & 0x3FF) << 10) + (int(low, 16) & 0x3FF)
        else:
            code = int(long or four or two, 16)
        return _write_char(code), code, match.end()
    if char in CONTROLS:
        return _write_char(CONTROLS[char]), CONTROLS[char], at + 1
    if char and not char.isalnum():
        return _write_char(ord(char)), ord(char), at + 1
    return f"\\{char}", None, at + 1


def _write_char(code: int) -> str:
    return chr(code) if code < 128 and chr(code).isalnum() else f"\\x{{{code:x}}}"
