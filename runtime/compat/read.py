"""Read configurations of vLLM and TensorRT-LLM into mtpbuild's settings."""

import difflib
from collections.abc import Iterator, Mapping

from mtpbuild.runtime.checks import switch
from mtpbuild.runtime.compat.tables import MTP, SPECULATIVE, TRTLLM, VLLM, Key, Methods, Table
from mtpbuild.runtime.configuration import CHECKS, NOTES, Said, as_object, checked, show
from mtpbuild.runtime.errors import UsageError


def read_keys(raw: object, table: Table, where: str) -> Iterator[Said]:
    """Yield the settings and notes of an object's keys, including those of nested objects.

    Raises UsageError for a key that is unknown or unsupported, and for a wrong value.
    """
    given = as_object(raw, where)
    if table is SPECULATIVE and given.get("decoding_type") is None:
        raise UsageError(f"{where}: decoding_type is missing; supported: {MTP.ours}")
    for key, value in given.items():
        name, known = f"{where}: {key}", table.get(key)
        if known is None:
            raise UsageError(f"{where}: unknown key {key!r}{_nearest(key, table)}")
        if isinstance(known, Methods):
            yield from check_method(known.ours if value is None else value, known, name)
        elif isinstance(known, Mapping):
            yield from read_keys(value, known, name) if value is not None else ()
        elif not known.setting and not known.refused:
            yield NOTES, name, f"{name}: no effect{known.instead and f'; {known.instead}'}"
        elif value is None or (type(value) is int and value in known.idle):
            continue
        elif known.true:
            yield known.setting, name, known.true if checked(switch, value, name) else None
        elif known.setting:
            yield known.setting, name, checked(CHECKS[known.setting], value, name)
        elif value:
            line = f"{name} {show(value)} is not supported by this version"
            raise UsageError(f"{line}; {known.refused}: leave it out")


def check_method(name: object, methods: Methods, where: str) -> Iterator[Said]:
    """Yield a note for a deprecated name of the MTP method; raise UsageError for another method."""
    names = {_spelling(method): method for method in (methods.ours, *methods.others)}
    given = _spelling(name)
    if given in [_spelling(f"{model}_mtp") for model in methods.models]:
        yield NOTES, where, f"{where} {name!r} is deprecated: write {methods.ours!r}"
    elif names.get(given) != methods.ours:
        unknown = f"unknown method {name!r:.60}, known: {', '.join(names.values())}"
        other = f"{name!r} is not supported by mtpbuild; supported: {methods.ours}"
        raise UsageError(f"{where}: {other if given in names else unknown}")


def _spelling(name: object) -> str:
    return str(name).lower().replace("_", "").replace("-", "")


def _nearest(key: str, table: Table) -> str:
    """Return a hint for an unknown key: its place, its name in this table, or a similar key."""
    if table is TRTLLM and key in SPECULATIVE:
        return "; it belongs under speculative_config"
    every = {**VLLM, **SPECULATIVE, **TRTLLM}
    ours = {n: known.setting for n, known in every.items() if isinstance(known, Key)}
    same = [n for n in table if ours.get(n) == (ours.get(key) or key)]
    if near := same or difflib.get_close_matches(key, table, 1):
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(n for n in table if n not in ours or ours[n])}"
