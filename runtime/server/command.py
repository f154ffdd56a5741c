"""The command `serve`."""

import contextlib
from pathlib import Path
from typing import Annotated

from typer import Option

from mtpbuild.runtime.cli.commands import LoadFlags, error_line
from mtpbuild.runtime.contract.target_options import changed
from mtpbuild.runtime.errors import MtpbuildError, UsageError, needing
from mtpbuild.runtime.flag_groups import flag, grouped
from mtpbuild.runtime.server.options import ReplicaFlags, ServerOptions, read_key


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
    with needing("`mtpbuild serve` needs", "serve"):
        from mtpbuild.runtime.server import server
    from mtpbuild.runtime import SamplingParams, StructuredOutputs
    from mtpbuild.runtime.contract.manifest import read_manifest
    from mtpbuild.runtime.engine.engine import Engine
    from mtpbuild.runtime.group import start as ranks
    from mtpbuild.runtime.programs.follow import follow
    from mtpbuild.runtime.sampling.defaults import sampling_defaults
    from mtpbuild.runtime.tool_calls import FORMS

    forms = [*FORMS, "none"]
    if own.tool_call_parser not in (None, *forms):
        raise UsageError(f"--tool-call-parser {own.tool_call_parser}: one of {', '.join(forms)}")
    _check(65535, port=port)
    _check(10**9, max_queue=own.max_queue, max_body=own.max_body)
    _check(10**15, prefix_cache_bytes=own.prefix_cache_bytes)
    _check(10**9, request_timeout=own.request_timeout, drain_timeout=drain_timeout)
    manifest = read_manifest(engine)  # fails before listening if the folder is not an engine
    settings = ServerOptions(
        **vars(own),
        defaults=sampling_defaults(engine, manifest),
        key=read_key(own.api_key),
        log_requests=log_requests,
        access_log=not no_access_log,
    )

    def load() -> Engine:
        options = changed(load_flags)
        loaded = settings.load_engine(engine, verify_hashes=verify_hashes, **options)
        # The first grammar reads the vocabulary, up to a second: do it before the first request.
        with contextlib.suppress(MtpbuildError):
            loaded.check(SamplingParams(structured_outputs=StructuredOutputs(choice=("yes",))))
        return loaded

    address = server.Address(host, port, drain_timeout)
    with contextlib.ExitStack() as stack:
        if manifest.split and not ranks.in_group():
            stack.enter_context(ranks.start_ranks(engine, manifest, own.threads))
        elif manifest.split and ranks.own_rank(engine, manifest):
            server.ignore_signals()
            follow(engine, own.threads)
            return
        server.serve(load, settings, address)


def _check(most: int, **given: float | None) -> None:
    for name, value in given.items():
        if value is not None and not 0 <= value <= most:
            raise UsageError(f"--{name.replace('_', '-')} {value} can't be: 0 to {most}")
