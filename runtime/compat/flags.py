"""Defines the flags of vLLM and TensorRT-LLM for all commands, and reads them.

The command line reads an underscore in a flag as a dash, so older spellings work as well.
"""

from collections.abc import Iterable
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import typer

from mtpbuild.runtime.compat.parse import (
    VLLM_FLAG,
    YAML_FLAG,
    parse_llm_yaml,
    parse_speculative_config,
    read_value,
)
from mtpbuild.runtime.compat.settings import Settings, Source, agreed, merge
from mtpbuild.runtime.compat.tensorrt_llm import TRTLLM_METHODS, TRTLLM_SPECULATIVE
from mtpbuild.runtime.contract.drafters import check_offered
from mtpbuild.runtime.flag_groups import flag
from mtpbuild.runtime.sampling import SETTINGS, SamplingParams

ALGO_FLAG = "--spec-decode-algo"


@dataclass(frozen=True, kw_only=True)
class CompatFlags:
    """Holds a configuration in vLLM's or TensorRT-LLM's words."""

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
RELAXED = [n for n in TRTLLM_SPECULATIVE.ours if n in SETTINGS and SETTINGS[n].help]
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

# A field of the groups -> TensorRT-LLM's key, whose check it shares.
KEYS = {
    "spec_decode_nextn": "max_draft_len",
    "spec_decode_max_draft_len": "max_draft_len",
    **{name: name for name in (SWITCH, *RELAXED)},
}


def read_flags(
    compat: CompatFlags,
    relaxed: RelaxedFlags = UNRELAXED,
    *,
    also: Iterable[Source] = (),
    nextn: tuple[int | str, ...] | None = None,
    drafter: str | None = None,
) -> Settings:
    """Joins the flags' settings with those of a command, and prints notes to standard error.

    also, nextn, drafter: the settings that the command's own flags give. Raises UsageError for a
    value that is wrong, contradictory or not supported by this version.
    """
    check_offered(drafter)
    if compat.spec_decode_algo is not None:
        TRTLLM_METHODS.check(compat.spec_decode_algo, ALGO_FLAG)
    sources = [Source("--drafter", Settings(drafter=drafter)), *also]
    typed = vars(compat) | vars(relaxed)
    for name, key in KEYS.items():
        if typed[name] is not None and typed[name] is not False:
            own = "--" + name.replace("_", "-")
            found = read_value(TRTLLM_SPECULATIVE, key, typed[name], own)
            sources.append(Source(own, Settings(**{TRTLLM_SPECULATIVE.ours[key]: found})))
    if (relaxed.relaxed_topk or 1) > 1:  # the flag alone switches it on
        sources.append(Source("--relaxed-topk", Settings(use_relaxed_acceptance_for_thinking=True)))
    if compat.speculative_config is not None:
        sources.append(Source(VLLM_FLAG, parse_speculative_config(compat.speculative_config)))
    if compat.config is not None:
        sources.append(Source(f"{YAML_FLAG} {compat.config}", parse_llm_yaml(compat.config)))
    if nextn is not None:
        said = [(s.name, _numbers(s.settings.nextn)) for s in sources]
        agreed("nextn", [("--nextn", _numbers(*nextn)), *said])
    settings = merge(sources)
    for note in settings.notes:
        typer.echo(f"note: {note}", err=True)
    return settings


def _numbers(*nextn: int | str | None) -> str | None:
    return None if None in nextn else ",".join(map(str, dict.fromkeys(nextn)))
