"""The flags of a request's settings, made from the table of settings, and other systems' flags.

The command line reads underscores in flags as dashes, so older spellings work as well.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, make_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

import typer

from mtpbuild.runtime.configuration.read import (
    VLLM_FLAG,
    YAML_FLAG,
    check_method,
    parse_llm_yaml,
    parse_speculative_config,
)
from mtpbuild.runtime.configuration.settings import (
    CHECKS,
    NOTES,
    SWITCH,
    Configuration,
    Given,
    checked,
    join,
    list_relaxed_notes,
    name_source,
    read_sampling_settings,
)
from mtpbuild.runtime.configuration.tables import MTP
from mtpbuild.runtime.contract.drafters import check_offered
from mtpbuild.runtime.contract.rules import all_rules
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.flag_groups import drafts_flag, flag, name_flag
from mtpbuild.runtime.sampling.params import DEFAULTS, SETTINGS, SamplingParams, to_params_fields

if TYPE_CHECKING:
    from mtpbuild.runtime.contract.manifest import Manifest

Field = tuple[str, Any, Any]
GREEDY_REJECTION = "at temperature 0 rejection acceptance is the same as strict: nothing is drawn"
HINTS = get_type_hints(SamplingParams)
RELAXED_FLAGS = ("relaxed_topk", "relaxed_delta")


def list_setting_fields(everywhere: bool) -> Iterator[Field]:
    """Yield the fields of the flags for all commands, or of those for `run` alone.

    Numbers keep their default, other types default to None.
    """
    for name, setting in SETTINGS.items():
        if not setting.help or name in RELAXED_FLAGS or setting.everywhere is not everywhere:
            continue
        hint, default = HINTS[name], DEFAULTS[name]
        if not isinstance(default, int | float):
            is_text = setting.parse or isinstance(default, str)
            hint = list[str] | None if default == () else str | None if is_text else hint
            default = None
        yield name, hint, flag(default, setting.help, panel=setting.panel)


def list_rule_fields() -> Iterator[Field]:
    """Yield the fields of the settings of acceptance rules."""
    for rule in all_rules():
        hints = get_type_hints(rule.settings)
        for name, setting in rule.declarations.items():
            yield name, hints[name] | None, drafts_flag(None, setting.help)


make_group: Any = partial(make_dataclass, frozen=True, kw_only=True)
SHARED = [*list_setting_fields(everywhere=True), *list_rule_fields()]
SamplingFlags: Any = make_group("SamplingFlags", SHARED)
RunFlags: Any = make_group("RunFlags", [*SHARED, *list_setting_fields(everywhere=False)])


@dataclass(frozen=True, kw_only=True)
class CompatFlags:
    """A configuration under vLLM's or TensorRT-LLM's names."""

    PANEL: ClassVar = "Other programs' names"

    speculative_config: str | None = flag(None, "vLLM's JSON (docs/configuration.md).")
    config: Path | None = flag(
        None,
        "TensorRT-LLM's YAML file (docs/configuration.md).",
        *(YAML_FLAG, "--extra-llm-api-options"),
    )
    spec_decode_algo: str | None = flag(None, "TensorRT-LLM's name of the method: MTP.")
    spec_decode_nextn: int | None = flag(None, "TensorRT-LLM's older name of nextn.")
    spec_decode_max_draft_len: int | None = flag(None, "TensorRT-LLM's name of nextn.")


# The flags of TensorRT-LLM's relaxed acceptance.
RelaxedFlags: Any = make_group(
    "RelaxedFlags",
    [
        (
            SWITCH,
            bool,
            drafts_flag(False, "Accept near misses within <think> (docs/configuration.md)."),
        ),
        *(
            (name, HINTS[name] | None, drafts_flag(None, SETTINGS[name].help))
            for name in RELAXED_FLAGS
        ),
    ],
)

# A field of the groups -> the setting that it gives.
FIELDS = {
    **dict.fromkeys(("spec_decode_nextn", "spec_decode_max_draft_len"), "nextn"),
    **{name: name for name in (SWITCH, *RELAXED_FLAGS)},
}


def read_flags(
    compat: CompatFlags,
    relaxed: Any = None,
    *,
    also: Iterable[Given] = (),
    nextn: tuple[int | str, ...] | None = None,
    drafter: str | None = None,
) -> dict[str, Any]:
    """Join the flags' settings with those of a command, and print notes to standard error.

    relaxed: `RelaxedFlags`, of a command that has them. also, nextn, drafter: the settings that the
    command's own flags give. Raises UsageError for a value that is wrong, contradictory or not
    supported by this version.
    """
    check_offered(drafter)
    if compat.spec_decode_algo is not None:
        join(check_method(compat.spec_decode_algo, MTP, "--spec-decode-algo"))
    values: list[Given] = [("drafter", "--drafter", drafter), *also]
    typed = vars(compat) | (vars(relaxed) if relaxed else {})
    for name, setting in FIELDS.items():
        if typed.get(name) is not None and typed[name] is not False:
            source = name_flag(name)
            values.append((setting, source, checked(CHECKS[setting], typed[name], source)))
    if (typed.get("relaxed_topk") or 1) > 1:  # the number alone switches relaxed acceptance on
        values.append((SWITCH, "--relaxed-topk", True))
    if compat.speculative_config is not None:
        values += name_source(parse_speculative_config(compat.speculative_config), VLLM_FLAG)
    if compat.config is not None:
        values += name_source(parse_llm_yaml(compat.config), f"{YAML_FLAG} {compat.config}")
    if nextn is not None:
        numbers = ",".join(map(str, dict.fromkeys(nextn)))
        others = [(name, source, str(n)) for name, source, n in values if name == "nextn"]
        join([("nextn", "--nextn", numbers), *others])
    settings = join(values)
    for note in (*settings.get(NOTES, ()), *list_relaxed_notes(settings)):
        typer.echo(f"note: {note}", err=True)
    return settings


def make_sampling_params(
    flags: Any, settings: Configuration, engine: "Manifest | None" = None, **others: Any
) -> SamplingParams:
    """Join the settings of flags, configuration and `others` for requests of an engine.

    Raises UsageError for a contradiction, RequestError for an invalid value.
    """
    typed = to_params_fields(vars(flags) | others, engine)
    for name, value in typed.items():
        parse = SETTINGS[name].parse
        if parse and isinstance(value, str):
            typed[name] = parse(name_flag(name), value)
    joined = read_sampling_settings(settings)
    for name, wanted in typed.items():
        if (configured := joined.setdefault(name, wanted)) != wanted:
            by = "rejection_sample_method" if name == "acceptance" else f"{name} {configured}"
            raise UsageError(f"{name_flag(name)} {wanted} contradicts the configuration's {by}")
    params = SamplingParams(**joined)
    if params.acceptance == "rejection" and params.temperature == 0 and not params.synthetic:
        typer.echo(f"note: {GREEDY_REJECTION}", err=True)
    return params
