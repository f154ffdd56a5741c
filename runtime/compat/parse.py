"""vLLM's --speculative-config and TensorRT-LLM's YAML file, read into settings of ours."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mtpbuild.runtime.checks import NEXTN_LIMIT, SETTINGS, switch, whole_number
from mtpbuild.runtime.compat.settings import Settings, agreed
from mtpbuild.runtime.compat.tensorrt_llm import TRTLLM, TRTLLM_METHODS, TRTLLM_SPECULATIVE
from mtpbuild.runtime.compat.text import as_object, read_json, read_yaml
from mtpbuild.runtime.compat.vllm import VLLM, VLLM_METHODS
from mtpbuild.runtime.compat.vocabulary import Vocabulary
from mtpbuild.runtime.errors import RequestError, UsageError
from mtpbuild.runtime.synthetic import check_synthetic, synthetic_rates

VLLM_FLAG, YAML_FLAG = "--speculative-config", "--config"
READERS = SETTINGS | {
    "nextn": whole_number(0, NEXTN_LIMIT),
    "use_relaxed_acceptance_for_thinking": switch,
}


def parse_speculative_config(text: str) -> Settings:
    """vLLM's JSON object; raises UsageError with the key and what it must be."""
    raw = read_json(text, VLLM_FLAG)
    method, notes = raw.pop(VLLM_METHODS.key, None), list[str]()
    if method is not None:
        where = f"{VLLM_FLAG}: {VLLM_METHODS.key}"
        notes += VLLM_METHODS.check(method, where)
    found = read_keys(raw, VLLM, VLLM_FLAG, others=TRTLLM_SPECULATIVE, notes=notes)
    rates, length = found.synthetic_acceptance_rates, found.synthetic_acceptance_length
    try:
        check_synthetic(found.rejection_sample_method, rates, length)
    except RequestError as error:
        raise UsageError(f"{VLLM_FLAG}: {error}") from None
    if found.nextn is not None:
        synthetic_rates(rates, length, found.nextn)
    return found


def parse_llm_yaml(path: Path) -> Settings:
    """TensorRT-LLM's YAML file; raises UsageError with the key and what it must be."""
    where, methods = f"{YAML_FLAG} {path}", TRTLLM_METHODS
    raw = read_yaml(path, where)
    inner = raw.pop("speculative_config", None)
    outer = read_keys(raw, TRTLLM, where, others=TRTLLM_SPECULATIVE)
    if inner is None:
        return outer
    where = f"{where}: speculative_config"
    inner = as_object(inner, where)
    if inner.get(methods.key) is None:
        raise UsageError(f"{where}: {methods.key} is missing; supported: {methods.ours}")
    methods.check(inner.pop(methods.key), f"{where}: {methods.key}")
    return read_keys(inner, TRTLLM_SPECULATIVE, where, others=VLLM, notes=outer.notes)


def read_keys(
    raw: Mapping[str, object],
    known: Vocabulary,
    where: str,
    *,
    others: Vocabulary,
    notes: Iterable[str] = (),
) -> Settings:
    """Sort the keys of one object, behind the notes that there are.

    others: where a stray key may have come from.
    """
    given: dict[str, list[tuple[str, object]]] = {}
    notes = [*notes]
    for key, value in raw.items():
        name = f"{where}: {key}"
        if key in known.ours:
            said = (name, read_value(known, key, value, name))
            given.setdefault(known.ours[key], []).append(said)
        elif key in known.later:
            known.later[key].check(name, value)
        elif key in known.no_effect:
            hint = known.no_effect[key]
            notes.append(f"{name}: no effect" + (f"; {hint}" if hint else ""))
        else:
            raise UsageError(f"{where}: unknown key {key!r}{_nearest(key, known, others)}")
    values: dict[str, Any] = {name: agreed(name, pairs) for name, pairs in given.items()}
    return Settings(**values, notes=tuple(notes))


def read_value(known: Vocabulary, key: str, value: object, label: str) -> Any:
    """Our setting for a key's value; None leaves it unset. Raises UsageError with the label."""
    try:
        if value is None:
            return None
        if key in known.switches:  # false leaves the choice to us
            return known.switches[key] if switch(value) else None
        return READERS[known.ours[key]](value)
    except ValueError as error:
        raise UsageError(f"{label} {error}") from None


def _nearest(key: str, known: Vocabulary, others: Vocabulary) -> str:
    """A hint for an unknown key: where it belongs, our spelling of it, or the nearest one."""
    if known is TRTLLM and key in (TRTLLM_METHODS.key, *others.ours, *others.later):
        return "; it belongs under speculative_config"
    setting = others.ours.get(key, key)  # also our own names
    same = [mine for mine, name in known.ours.items() if name == setting]
    wanted = [*known.ours] or ["speculative_config"]
    near = same or difflib.get_close_matches(key, [*wanted, *known.later, *known.no_effect], 1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(wanted)}"
