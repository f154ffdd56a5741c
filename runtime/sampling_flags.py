"""The flags of a request's settings, made from their table."""

from dataclasses import make_dataclass
from typing import Any, get_type_hints

import typer

from mtpbuild.runtime.configuration import Settings, sampling_settings
from mtpbuild.runtime.configuration_flags import HINTS, RELAXED
from mtpbuild.runtime.contract.rules import all_rules
from mtpbuild.runtime.contract.settings import Setting
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.flag_groups import flag
from mtpbuild.runtime.sampling import DEFAULTS, SETTINGS, SamplingParams, as_fields

Field = tuple[str, Any, Any]
GREEDY_REJECTION = "at temperature 0 rejection acceptance is the same as strict: nothing is drawn"


def flag_field(name: str, hint: Any, setting: Setting) -> Field:
    """Return the field of a flag; numbers keep their default, other types default to None."""
    default = DEFAULTS[name]
    if isinstance(default, int | float):
        return name, hint, flag(default, setting.help)
    if default == ():
        hint = list[str] | None
    elif setting.parse or isinstance(default, str):
        hint = str | None
    return name, hint, flag(None, setting.help)


def fields_of(everywhere: bool) -> list[Field]:
    """Return the fields for all commands, or those for `run` alone."""
    shown = {n: s for n, s in SETTINGS.items() if s.help and n not in RELAXED}
    return [flag_field(n, HINTS[n], s) for n, s in shown.items() if s.everywhere is everywhere]


def rule_fields() -> list[Field]:
    """Return the fields of the settings of acceptance rules."""
    return [
        (name, get_type_hints(rule.settings)[name] | None, flag(None, setting.help))
        for rule in all_rules()
        for name, setting in rule.known.items()
    ]


def group(name: str, fields: list[Field]) -> Any:
    return make_dataclass(name, fields, frozen=True, kw_only=True)


# The flags of vLLM and TensorRT-LLM are in `configuration_flags.py`.
SamplingFlags: Any = group("SamplingFlags", [*fields_of(everywhere=True), *rule_fields()])
RequestFlags: Any = group("RequestFlags", fields_of(everywhere=False))


def sampling_params(flags: Any, settings: Settings, **others: Any) -> SamplingParams:
    """Join the settings of flags, configuration and `others`.

    Raises UsageError for a contradiction, RequestError for an invalid value.
    """
    typed = as_fields(vars(flags) | others)
    for name, value in typed.items():
        parse = SETTINGS[name].parse
        if parse and isinstance(value, str):
            typed[name] = parse(option(name), value)
    asked = sampling_settings(settings)
    for name, wanted in typed.items():
        if (said := asked.setdefault(name, wanted)) != wanted:
            by = "rejection_sample_method" if name == "acceptance" else f"{name} {said}"
            raise UsageError(f"{option(name)} {wanted} contradicts the configuration's {by}")
    params = SamplingParams(**asked)
    if params.acceptance == "rejection" and params.temperature == 0 and not params.synthetic:
        typer.echo(f"note: {GREEDY_REJECTION}", err=True)
    return params


def option(name: str) -> str:
    """Return a setting's name as a flag."""
    return "--" + name.replace("_", "-")
