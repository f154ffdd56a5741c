"""Defines the command `serve`."""

import contextlib
from pathlib import Path
from typing import Annotated

from typer import Option

from mtpbuild.runtime.cli import LoadFlags, error_line
from mtpbuild.runtime.errors import MissingDependencyError, MtpbuildError, UsageError
from mtpbuild.runtime.flag_groups import flag, grouped
from mtpbuild.runtime.target_options import changed


@error_line
@grouped
def serve(
    engine: Annotated[Path, Option(help="Engine directory.")],
    load_flags: LoadFlags,
    host: str = flag("127.0.0.1", "Address to listen on."),
    port: int = flag(8000, "Port to listen on; 0: any."),
    served_model_name: str | None = flag(None, "The model's name to clients."),
    api_key: Path | None = flag(
        None, "File whose first line is the API key; else MTPBUILD_API_KEY, if it is set."
    ),
    max_queue: int = flag(256, "Requests that may wait; more get 429."),
    request_timeout: float | None = flag(None, "Seconds that a request may take."),
    drain_timeout: float = flag(60.0, "Seconds for running requests after SIGTERM."),
    max_body: int = flag(8 * 1024 * 1024, "Bytes that a request's body may have."),
    allow_origin: list[str] | None = flag(None, "Let pages of this origin ask (CORS)."),
    no_prefix_cache: bool = flag(False, "Fill in every prompt from its beginning."),
    no_thinking_split: bool = flag(False, "Leave what is thought in the text."),
    tool_call_parser: str | None = flag(
        None, "deepseek_v3, deepseek_v31, hermes or none; default: as the chat template."
    ),
    log_requests: bool = flag(False, "Log prompts."),
    threads: int | None = flag(None, "CPU threads; default: all cores."),
    verify_hashes: bool = flag(False, "Hash all files, however large."),
) -> None:
    """Serve an engine over HTTP, as OpenAI's API (docs/serving.md)."""
    try:
        from mtpbuild.runtime.server import server
    except ImportError as error:
        missing = f"`mtpbuild serve` needs {error.name}: pip install 'mtpbuild[serve]'"
        raise MissingDependencyError(missing) from None
    from mtpbuild.runtime import SamplingParams, StructuredOutputs
    from mtpbuild.runtime.contract.manifest import read_manifest
    from mtpbuild.runtime.engine import Engine
    from mtpbuild.runtime.follow import follow
    from mtpbuild.runtime.group import start as ranks
    from mtpbuild.runtime.server.service import Settings
    from mtpbuild.runtime.server.tools import FORMS

    forms = [*FORMS, "none"]
    if tool_call_parser is not None and tool_call_parser not in forms:
        raise UsageError(f"--tool-call-parser {tool_call_parser}: one of {', '.join(forms)}")
    _check(65535, port=port)
    _check(10**9, max_queue=max_queue, max_body=max_body)
    _check(10**9, request_timeout=request_timeout, drain_timeout=drain_timeout)
    manifest = read_manifest(engine)  # what is no engine is said before anything listens
    settings = Settings(
        model=served_model_name,
        api_key=server.read_key(api_key),
        max_queue=max_queue,
        request_timeout=request_timeout or None,
        max_body=max_body,
        cors=tuple(allow_origin or ()),
        thinking=not no_thinking_split,
        tool_parser=tool_call_parser,
        log_requests=log_requests,
    )

    def load() -> Engine:
        loaded = Engine.load(
            engine,
            threads=threads,
            verify_hashes=verify_hashes,
            prefix_cache=not no_prefix_cache,
            **changed(load_flags),
        )
        # The first grammar reads the vocabulary, a second of a large one: no request waits for it.
        with contextlib.suppress(MtpbuildError):
            loaded.check(SamplingParams(structured_outputs=StructuredOutputs(choice=("yes",))))
        return loaded

    address = server.Address(host, port, drain_timeout)
    with contextlib.ExitStack() as stack:
        if manifest.split and not ranks.in_group():
            stack.enter_context(ranks.started(engine, manifest, threads))
        elif manifest.split and ranks.own_rank(engine, manifest):
            server.outlive_signals()
            follow(engine, threads)
            return
        server.serve(engine, load, settings, address)


def _check(most: int, **given: float | None) -> None:
    for name, value in given.items():
        if value is not None and not 0 <= value <= most:
            raise UsageError(f"--{name.replace('_', '-')} {value} can't be: 0 to {most}")
