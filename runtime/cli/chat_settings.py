"""The settings of a conversation in the terminal, as `/set` shows and changes them."""

import json
from dataclasses import replace
from typing import Any

from mtpbuild.runtime.sampling.params import SETTINGS, SamplingParams, list_http_settings

UNSEEN = ("logprobs", "prompt_logprobs", "cache_salt")  # settings that a chat doesn't show


def change_setting(
    params: SamplingParams, first: SamplingParams, name: str, text: str
) -> SamplingParams:
    """Return the settings with one changed; first: those that the text `default` brings back."""
    if text == "default":
        value = read_value_of(first, name)
    elif (parse := SETTINGS[name].parse if name in SETTINGS else None) is not None:
        value = parse(f"/set {name}", text)
    else:
        value = _parse_json_or_text(text)
    changes: dict[str, Any] = {name: value}
    if name not in SETTINGS:
        rule = {**(params.acceptance_settings or {}), name: value}
        changes = {"acceptance_settings": {n: v for n, v in rule.items() if v is not None}}
    elif name == "acceptance":  # another rule has other settings
        changes["acceptance_settings"] = None
    return replace(params, **changes)


def list_settable_names() -> list[str]:
    """Return the names of the settings that an answer in the terminal can have."""
    own = [name for name, each in SETTINGS.items() if each.http or each.help]
    return [name for name in dict.fromkeys([*own, *list_http_settings()]) if name not in UNSEEN]


def read_value_of(params: SamplingParams, name: str) -> Any:
    """Return a setting's value, also of a rule's own one."""
    rule = params.acceptance_settings or {}
    return getattr(params, name) if name in SETTINGS else rule.get(name)


def _parse_json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
