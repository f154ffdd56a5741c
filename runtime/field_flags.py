"""The flags of vLLM and TensorRT-LLM, the same on every command that takes them.

The command line reads an underscore in a flag as a dash, so their older spellings work as well.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.field_config import (
    VLLM_FLAG,
    YAML_FLAG,
    DrafterName,
    Settings,
    Source,
    agreed,
    check_method,
    merge,
    parse_llm_yaml,
    parse_speculative_config,
    require_supported,
)
from mtpbuild.runtime.field_keys import TRTLLM_METHODS, TRTLLM_SPECULATIVE

ALGO_FLAG = "--spec-decode-algo"

SpeculativeConfig: TypeAlias = Annotated[
    str | None,
    typer.Option(VLLM_FLAG, help="vLLM's JSON (docs/configuration.md)."),
]
Config: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        YAML_FLAG,
        "--extra-llm-api-options",
        help="TensorRT-LLM's YAML file (docs/configuration.md).",
    ),
]
SpecDecodeAlgo: TypeAlias = Annotated[
    str | None, typer.Option(ALGO_FLAG, help="TensorRT-LLM's; MTP.")
]
SpecDecodeNextn: TypeAlias = Annotated[
    int | None,
    typer.Option("--spec-decode-nextn", help="TensorRT-LLM's older name of the next."),
]
SpecDecodeMaxDraftLen: TypeAlias = Annotated[
    int | None,
    typer.Option("--spec-decode-max-draft-len", help="TensorRT-LLM's name of nextn."),
]
UseRelaxed: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--use-relaxed-acceptance-for-thinking",
        help="Accept near misses within <think> (docs/configuration.md).",
    ),
]
RelaxedTopk: TypeAlias = Annotated[
    int | None,
    typer.Option("--relaxed-topk", help="Relaxed: among so many most probable tokens."),
]
RelaxedDelta: TypeAlias = Annotated[
    float | None,
    typer.Option("--relaxed-delta", help="Relaxed: so much less probable than the first."),
]


def read_flags(
    *,
    nextn: tuple[int, ...] | None = None,
    drafter: DrafterName | None = None,
    speculative_config: str | None = None,
    config: Path | None = None,
    spec_decode_algo: str | None = None,
    spec_decode_nextn: int | None = None,
    spec_decode_max_draft_len: int | None = None,
    use_relaxed_acceptance_for_thinking: bool = False,
    relaxed_topk: int | None = None,
    relaxed_delta: float | None = None,
) -> Settings:
    """What the flags ask for together, with --nextn and --drafter of `build`; notes go to stderr.

    Raises UsageError for what is wrong, contradictory or not supported by this version.
    """
    sources = [Source("--drafter", Settings(drafter=drafter))]
    if spec_decode_algo is not None:
        check_method(TRTLLM_METHODS, spec_decode_algo, ALGO_FLAG)
    relaxed = use_relaxed_acceptance_for_thinking or None
    sources += _values(
        ("--spec-decode-nextn", "max_draft_len", spec_decode_nextn),
        ("--spec-decode-max-draft-len", "max_draft_len", spec_decode_max_draft_len),
        ("--use-relaxed-acceptance-for-thinking", "use_relaxed_acceptance_for_thinking", relaxed),
        ("--relaxed-topk", "relaxed_topk", relaxed_topk),
        ("--relaxed-delta", "relaxed_delta", relaxed_delta),
    )
    if relaxed_topk is not None and relaxed_topk > 1:  # the flag alone switches it on
        sources.append(Source("--relaxed-topk", Settings(use_relaxed_acceptance_for_thinking=True)))
    if speculative_config is not None:
        sources.append(Source(VLLM_FLAG, parse_speculative_config(speculative_config)))
    if config is not None:
        sources.append(Source(f"{YAML_FLAG} {config}", parse_llm_yaml(config)))
    if nextn is not None:
        said = [(s.name, _numbers(s.settings.nextn)) for s in sources]
        agreed("nextn", [("--nextn", _numbers(*nextn)), *said])
    settings = merge(sources)
    require_supported(settings)
    for note in settings.notes:
        typer.echo(f"note: {note}", err=True)
    return settings


def _numbers(*nextn: int | None) -> str | None:
    return None if None in nextn else ",".join(map(str, dict.fromkeys(nextn)))


def _values(*flags: tuple[str, str, object]) -> Iterator[Source]:
    """(flag, TensorRT-LLM's key, value) -> its setting, checked as the key is."""
    for flag, key, value in flags:
        if value is not None:
            name, read = TRTLLM_SPECULATIVE.ours[key]
            try:
                yield Source(flag, Settings(**{name: read(value)}))  # type: ignore[arg-type]
            except ValueError as error:
                raise UsageError(f"{flag} {error}") from None
