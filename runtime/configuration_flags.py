"""The flags of vLLM and TensorRT-LLM that all commands have.

The command line reads underscores in flags as dashes, so older spellings work as well.
"""

from collections.abc import Iterable
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import typer

from mtpbuild.runtime.compat.read import check_method
from mtpbuild.runtime.compat.tables import MTP
from mtpbuild.runtime.configuration import CHECKS, Said, Settings, checked, join, relaxed_notes
from mtpbuild.runtime.configuration_files import (
    VLLM_FLAG,
    YAML_FLAG,
    parse_llm_yaml,
    parse_speculative_config,
)
from mtpbuild.runtime.contract.drafters import check_offered
from mtpbuild.runtime.flag_groups import flag
from mtpbuild.runtime.sampling import SETTINGS, SamplingParams


@dataclass(frozen=True, kw_only=True)
class CompatFlags:
    """A configuration under vLLM's or TensorRT-LLM's names."""

    speculative_config: str | None = flag(None, "vLLM's JSON (docs/configuration.md).")
    config: Path | None = flag(
        None,
        "TensorRT-LLM's YAML file (docs/configuration.md).",
        *(YAML_FLAG, "--extra-llm-api-options"),
    )
    spec_decode_algo: str | None = flag(None, "TensorRT-LLM's name of the method: MTP.")
    spec_decode_nextn: int | None = flag(None, "TensorRT-LLM's older name of nextn.")
    spec_decode_max_draft_len: int | None = flag(None, "TensorRT-LLM's name of nextn.")


SWITCH = "use_relaxed_acceptance_for_thinking"
HINTS = get_type_hints(SamplingParams)
RELAXED = ("relaxed_topk", "relaxed_delta")
# The flags of TensorRT-LLM's relaxed acceptance.
RelaxedFlags: Any = make_dataclass(
    "RelaxedFlags",
    [
        (SWITCH, bool, flag(False, "Accept near misses within <think> (docs/configuration.md).")),
        *((name, HINTS[name] | None, flag(None, SETTINGS[name].help)) for name in RELAXED),
    ],
    frozen=True,
    kw_only=True,
)
UNRELAXED = RelaxedFlags()

# A field of the groups -> the setting that it gives.
FIELDS = {
    **dict.fromkeys(("spec_decode_nextn", "spec_decode_max_draft_len"), "nextn"),
    **{name: name for name in (SWITCH, *RELAXED)},
}


def read_flags(
    compat: CompatFlags,
    relaxed: RelaxedFlags = UNRELAXED,
    *,
    also: Iterable[Said] = (),
    nextn: tuple[int | str, ...] | None = None,
    drafter: str | None = None,
) -> Settings:
    """Join the flags' settings with those of a command, and print notes to standard error.

    also, nextn, drafter: the settings that the command's own flags give. Raises UsageError for a
    value that is wrong, contradictory or not supported by this version.
    """
    check_offered(drafter)
    if compat.spec_decode_algo is not None:
        join(check_method(compat.spec_decode_algo, MTP, "--spec-decode-algo"))
    said: list[Said] = [("drafter", "--drafter", drafter), *also]
    typed = vars(compat) | vars(relaxed)
    for name, setting in FIELDS.items():
        if typed[name] is not None and typed[name] is not False:
            own = "--" + name.replace("_", "-")
            said.append((setting, own, checked(CHECKS[setting], typed[name], own)))
    if (relaxed.relaxed_topk or 1) > 1:  # the number alone switches relaxed acceptance on
        said.append((SWITCH, "--relaxed-topk", True))
    if compat.speculative_config is not None:
        said += parse_speculative_config(compat.speculative_config).said(VLLM_FLAG)
    if compat.config is not None:
        said += parse_llm_yaml(compat.config).said(f"{YAML_FLAG} {compat.config}")
    if nextn is not None:
        numbers = ",".join(map(str, dict.fromkeys(nextn)))
        others = [each for each in said if each[0] == "nextn" and each[2] is not None]
        join([("nextn", "--nextn", numbers), *((n, who, str(value)) for n, who, value in others)])
    settings = join(said)
    for note in (*settings.notes, *relaxed_notes(settings)):
        typer.echo(f"note: {note}", err=True)
    return settings
