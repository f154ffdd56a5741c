"""The command `serve`, and the flags that it shares with the Ray application."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from mtpbuild.runtime.cli import LoadFlags, error_line
from mtpbuild.runtime.errors import MissingDependencyError, MtpbuildError, UsageError, install
from mtpbuild.runtime.flag_groups import flag, grouped
from mtpbuild.runtime.target_options import changed
from mtpbuild.runtime.threads import THREADS, parse_threads

if TYPE_CHECKING:
    from mtpbuild.runtime.server.service import Settings


@dataclass(frozen=True, kw_only=True)
class ReplicaFlags:
    """The flags that concern requests or the loading of the engine."""

    served_model_name: str | None = flag(None, "The model's name to clients.")
    api_key: Path | None = flag(
        None, "File whose first line is the API key; else MTPBUILD_API_KEY, if it is set."
    )
    max_queue: int = flag(256, "Requests that may wait; more get 429.")
    request_timeout: float | None = flag(None, "Seconds that a request may take.")
    max_body: int = flag(8 * 1024 * 1024, "Bytes that a request's body may have.")
    allow_origin: list[str] | None = flag(None, "Let pages of this origin ask (CORS).")
    allowed_hosts: list[str] | None = flag(
        None, "Name by which clients may call the server; *: any. Addresses and localhost may."
    )
    no_prefix_cache: bool = flag(False, "Fill in every prompt from its beginning.")
    prefix_cache_bytes: int | None = flag(
        None, "Memory for rows of earlier prompts; default: about 1/8 of what is free."
    )
    prefix_cache_dir: Path | None = flag(
        None, "Folder that keeps them for the next server, too; of this server alone."
    )
    no_thinking_split: bool = flag(False, "Leave thoughts in the text.")
    tool_call_parser: str | None = flag(
        None,
        "deepseek_v3, deepseek_v31, deepseek_v32, glm45, glm47, hermes, kimi_k2, minimax_m2, "
        "qwen3_coder or none; default: as the chat template.",
    )
    threads: int | None = flag(None, THREADS, parser=parse_threads)

    def prefixes(self) -> dict[str, Any]:
        """Return the arguments of `Engine.load` for the prefix cache."""
        return {
            "prefix_cache": not self.no_prefix_cache,
            "prefix_cache_bytes": self.prefix_cache_bytes,
            "prefix_cache_dir": self.prefix_cache_dir,
        }

    def settings(self, **others: Any) -> "Settings":
        """Return the service's settings; raises UsageError if the key's file can't be read."""
        from mtpbuild.runtime.server.server import read_key
        from mtpbuild.runtime.server.service import Settings

        return Settings(
            model=self.served_model_name,
            api_key=read_key(self.api_key),
            max_queue=self.max_queue,
            request_timeout=self.request_timeout or None,
            max_body=self.max_body,
            cors=tuple(self.allow_origin or ()),
            hosts=tuple(self.allowed_hosts or ()),
            thinking=not self.no_thinking_split,
            tool_parser=self.tool_call_parser,
            **others,
        )


@error_line
@grouped
def serve(
    engine: Annotated[Path, Option(help="Engine directory.")],
    own: ReplicaFlags,
    load_flags: LoadFlags,
    host: str = flag("127.0.0.1", "Address to listen on."),
    port: int = flag(8000, "Port to listen on; 0: any."),
    drain_timeout: float = flag(60.0, "Seconds for running requests after SIGTERM."),
    log_requests: bool = flag(False, "Log prompts."),
    no_access_log: bool = flag(False, "Log no line for each request."),
    verify_hashes: bool = flag(False, "Hash all files, however large."),
) -> None:
    """Serve an engine over HTTP, as OpenAI's API (docs/serving.md)."""
    try:
        from mtpbuild.runtime.server import server
    except ImportError as error:
        missing = f"`mtpbuild serve` needs {error.name}: {install('serve')}"
        raise MissingDependencyError(missing) from None
    from mtpbuild.runtime import SamplingParams, StructuredOutputs
    from mtpbuild.runtime.contract.manifest import read_manifest
    from mtpbuild.runtime.engine import Engine
    from mtpbuild.runtime.follow import follow
    from mtpbuild.runtime.group import start as ranks
    from mtpbuild.runtime.server.tools import FORMS

    forms = [*FORMS, "none"]
    if own.tool_call_parser not in (None, *forms):
        raise UsageError(f"--tool-call-parser {own.tool_call_parser}: one of {', '.join(forms)}")
    _check(65535, port=port)
    _check(10**9, max_queue=own.max_queue, max_body=own.max_body)
    _check(10**15, prefix_cache_bytes=own.prefix_cache_bytes)
    _check(10**9, request_timeout=own.request_timeout, drain_timeout=drain_timeout)
    manifest = read_manifest(engine)  # fails before listening if the folder is not an engine
    settings = own.settings(log_requests=log_requests, access_log=not no_access_log)

    def load() -> Engine:
        loaded = Engine.load(
            engine,
            threads=own.threads,
            verify_hashes=verify_hashes,
            warm=[SamplingParams(), SamplingParams(temperature=1.0)],
            **own.prefixes(),
            **changed(load_flags),
        )
        # The first grammar reads the vocabulary, up to a second: do it before the first request.
        with contextlib.suppress(MtpbuildError):
            loaded.check(SamplingParams(structured_outputs=StructuredOutputs(choice=("yes",))))
        return loaded

    address = server.Address(host, port, drain_timeout)
    with contextlib.ExitStack() as stack:
        if manifest.split and not ranks.in_group():
            stack.enter_context(ranks.started(engine, manifest, own.threads))
        elif manifest.split and ranks.own_rank(engine, manifest):
            server.outlive_signals()
            follow(engine, own.threads)
            return
        server.serve(engine, load, settings, address)


def _check(most: int, **given: float | None) -> None:
    for name, value in given.items():
        if value is not None and not 0 <= value <= most:
            raise UsageError(f"--{name.replace('_', '-')} {value} can't be: 0 to {most}")
