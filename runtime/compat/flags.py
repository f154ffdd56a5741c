"""The flags of vLLM and TensorRT-LLM, the same on every command that takes them.

The command line reads an underscore in a flag as a dash, so their older spellings work as well.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mtpbuild.runtime.compat.keys import TRTLLM_METHODS, TRTLLM_SPECULATIVE
from mtpbuild.runtime.compat.settings import (
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
from mtpbuild.runtime.errors import UsageError

ALGO_FLAG = "--spec-decode-algo"


@dataclass(frozen=True, kw_only=True)
class FieldFlags:
    """A configuration in vLLM's or TensorRT-LLM's words."""

    speculative_config: Annotated[
        str | None, typer.Option(VLLM_FLAG, help="vLLM's JSON (docs/configuration.md).")
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(
            YAML_FLAG,
            "--extra-llm-api-options",
            help="TensorRT-LLM's YAML file (docs/configuration.md).",
        ),
    ] = None
    spec_decode_algo: Annotated[
        str | None, typer.Option(ALGO_FLAG, help="TensorRT-LLM's; MTP.")
    ] = None
    spec_decode_nextn: Annotated[
        int | None, typer.Option(help="TensorRT-LLM's older name of the next.")
    ] = None
    spec_decode_max_draft_len: Annotated[
        int | None, typer.Option(help="TensorRT-LLM's name of nextn.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class RelaxedFlags:
    """TensorRT-LLM's relaxed acceptance."""

    use_relaxed_acceptance_for_thinking: Annotated[
        bool,
        typer.Option(
            "--use-relaxed-acceptance-for-thinking",
            help="Accept near misses within <think> (docs/configuration.md).",
        ),
    ] = False
    relaxed_topk: Annotated[
        int | None, typer.Option(help="Relaxed: among so many most probable tokens.")
    ] = None
    relaxed_delta: Annotated[
        float | None, typer.Option(help="Relaxed: so much less probable than the first.")
    ] = None


def read_flags(
    field: FieldFlags,
    relaxed: RelaxedFlags = RelaxedFlags(),
    *,
    also: Iterable[Source] = (),
    nextn: tuple[int | str, ...] | None = None,
    drafter: DrafterName | None = None,
) -> Settings:
    """What the flags ask for together, with --nextn and --drafter of `build`; notes go to stderr.

    also: what a command's own flags say. Raises UsageError for what is wrong, contradictory or not
    supported by this version.
    """
    sources = [Source("--drafter", Settings(drafter=drafter)), *also]
    if field.spec_decode_algo is not None:
        check_method(TRTLLM_METHODS, field.spec_decode_algo, ALGO_FLAG)
    topk, config = relaxed.relaxed_topk, field.config
    use_relaxed = relaxed.use_relaxed_acceptance_for_thinking or None
    sources += _values(
        ("--spec-decode-nextn", "max_draft_len", field.spec_decode_nextn),
        ("--spec-decode-max-draft-len", "max_draft_len", field.spec_decode_max_draft_len),
        (
            "--use-relaxed-acceptance-for-thinking",
            "use_relaxed_acceptance_for_thinking",
            use_relaxed,
        ),
        ("--relaxed-topk", "relaxed_topk", topk),
        ("--relaxed-delta", "relaxed_delta", relaxed.relaxed_delta),
    )
    if topk is not None and topk > 1:  # the flag alone switches it on
        sources.append(Source("--relaxed-topk", Settings(use_relaxed_acceptance_for_thinking=True)))
    if field.speculative_config is not None:
        sources.append(Source(VLLM_FLAG, parse_speculative_config(field.speculative_config)))
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


def _numbers(*nextn: int | str | None) -> str | None:
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
