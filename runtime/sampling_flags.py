"""The flags of a request's settings, made of their table."""

from dataclasses import make_dataclass
from typing import Any, get_type_hints

from mtpbuild.runtime.compat.settings import Settings, sampling_settings
from mtpbuild.runtime.contract.rules import all_rules
from mtpbuild.runtime.contract.settings import Setting
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.flag_groups import flag
from mtpbuild.runtime.sampling import DEFAULTS, SETTINGS, SamplingParams, as_fields

Field = tuple[str, Any, Any]


def flag_field(name: str, hint: Any, setting: Setting) -> Field:
    """The field of a flag: a number shows its default, anything else has None if it is not said."""
    default = DEFAULTS[name]
    if isinstance(default, int | float):
        return name, hint, flag(default, setting.help)
    if default == ():
        hint = list[str] | None
    elif setting.parse or isinstance(default, str):
        hint = str | None
    return name, hint, flag(None, setting.help)


def fields_of(everywhere: bool) -> list[Field]:
    """The fields of the settings whose flags all commands have, or run alone."""
    hints, shown = get_type_hints(SamplingParams), {n: s for n, s in SETTINGS.items() if s.help}
    return [flag_field(n, hints[n], s) for n, s in shown.items() if s.everywhere is everywhere]


def rule_fields() -> list[Field]:
    """The fields of the flags that rules of acceptance bring."""
    return [
        (name, get_type_hints(rule.settings)[name] | None, flag(None, setting.help))
        for rule in all_rules()
        for name, setting in rule.known.items()
    ]


def group(name: str, fields: list[Field]) -> Any:
    return make_dataclass(name, fields, frozen=True, kw_only=True)


# The flags of vLLM and TensorRT-LLM are in `compat/flags.py`.
SamplingFlags: Any = group("SamplingFlags", [*fields_of(everywhere=True), *rule_fields()])
RequestFlags: Any = group("RequestFlags", fields_of(everywhere=False))


def sampling_params(flags: Any, settings: Settings, **others: Any) -> SamplingParams:
    """Joins what flags, configuration and `others` ask of a request.

    Raises UsageError for a contradiction, RequestError for a value that can't be.
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
    return SamplingParams(**asked)


def option(name: str) -> str:
    """How the command line spells a setting."""
    return "--" + name.replace("_", "-")
