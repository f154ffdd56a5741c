"""The command `serve`."""

import contextlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias
from urllib.parse import quote

from typer import Option

from mtpbuild.runtime.cli.commands import LoadFlags, error_line
from mtpbuild.runtime.cli.sampling_flags import CompatFlags, read_flags
from mtpbuild.runtime.configuration.settings import check_engine, read_sampling_settings
from mtpbuild.runtime.contract.target_options import list_changed_flags
from mtpbuild.runtime.errors import MtpbuildError, UsageError, explain_missing_package
from mtpbuild.runtime.flag_groups import flag, group_flags
from mtpbuild.runtime.server.options import ReplicaFlags, ServerOptions, read_key

if TYPE_CHECKING:
    from mtpbuild.runtime.contract.manifest import Manifest
    from mtpbuild.runtime.engine.engine import Engine
    from mtpbuild.runtime.server.service import Services

    NamedEngines: TypeAlias = Mapping[str, tuple[Path, Manifest]]
    Load: TypeAlias = Callable[[ServerOptions, Path], Engine]


@error_line
@group_flags
def serve(
    engine: Annotated[
        list[str],
        Option(
            metavar="[NAME=]FOLDER",
            help="Engine, by folder or by name under engines/. Several: a request's `model` "
            "chooses.",
        ),
    ],
    replica: ReplicaFlags,
    load_flags: LoadFlags,
    host: str = flag("127.0.0.1", "Address to listen on."),
    port: int = flag(8000, "Port to listen on; 0: any."),
    keep: str | None = flag(
        None,
        "How long an idle engine stays loaded: 90s, 10m, 1h, 0, -1 (for ever). Default: 10m if "
        "there are several engines.",
    ),
    drain_timeout: float = flag(60.0, "Seconds for running requests after SIGTERM."),
    log_requests: bool = flag(False, "Log prompts."),
    no_access_log: bool = flag(False, "Log no line for each request."),
    verify_hashes: bool = flag(False, "Hash all files, however large."),
    config: Path | None = flag(None, "vLLM's or TensorRT-LLM's YAML file (docs/configuration.md)."),
    tensor_parallel_size: int | None = flag(
        None, "Ranks that share the model; the engine must have been built for as many."
    ),
) -> None:
    """Serve engines over HTTP, as OpenAI's API (docs/serving.md)."""
    with explain_missing_package("`mtpbuild serve`", "serve"):
        from mtpbuild.runtime.server import server
    from mtpbuild.runtime.programs.follow import lead_or_follow
    from mtpbuild.runtime.server.options import parse_keep

    for name, value, limit in (("port", port, 65535), ("drain-timeout", drain_timeout, 10**9)):
        if not 0 <= value <= limit:
            raise UsageError(f"--{name} {value} is outside 0..{limit}")
    settings = ServerOptions(
        **vars(replica) | {"allowed_hosts": [*(replica.allowed_hosts or ()), host]},
        key=read_key(replica.api_key),
        log_requests=log_requests,
        access_log=not no_access_log,
    )
    # Reading the manifests fails before listening if a folder is not an engine.
    engines = read_engines(engine, replica.served_model_name)
    tp = ("tp", "--tensor-parallel-size", tensor_parallel_size)
    configured = read_flags(CompatFlags(config=config), also=[tp])
    if read_sampling_settings(configured):
        print("note: acceptance is chosen per request: let clients ask for it", file=sys.stderr)
    for _, manifest in engines.values():
        check_engine(configured, manifest.build)
    on_demand = len(engines) > 1 or keep is not None
    seconds = parse_keep(keep or "10m") if on_demand else None
    load = partial(_load, verify_hashes=verify_hashes, **list_changed_flags(load_flags))
    address = server.Address(host, port, drain_timeout)
    folder, manifest = next(iter(engines.values()))
    with contextlib.ExitStack() as stack:
        if not on_demand:
            joined = lead_or_follow(folder, manifest, replica.threads, server.ignore_signals)
            if not stack.enter_context(joined):
                return
        server.serve(make_services(engines, settings, load, seconds), address)


def read_engines(texts: Sequence[str], served_name: str | None) -> "NamedEngines":
    """Return folders and manifests by the names that clients use; raise MtpbuildError."""
    from mtpbuild.runtime.cli.engines import find_engine
    from mtpbuild.runtime.contract.manifest import MANIFEST, read_manifest

    engines = dict[str, tuple[Path, "Manifest"]]()
    for text in texts:
        name, equals, folder = text.partition("=")
        if not equals or (Path(text) / MANIFEST).is_file():
            name, folder = "", text
        if served_name is not None and (name or len(texts) > 1):
            message = "--served-model-name is for one --engine FOLDER"
            raise UsageError(f"{message}: other engines are named by --engine NAME=FOLDER")
        path = find_engine(Path(folder))
        manifest = read_manifest(path)
        name = name or served_name or manifest.model.name
        if name in engines:
            raise UsageError(f"two engines are called {name}: give --engine NAME=FOLDER")
        engines[name] = path, manifest
    return engines


def make_services(
    engines: "NamedEngines", settings: ServerOptions, load: "Load", keep: float | None
) -> "Services":
    """Return the engines' services; keep: seconds that an idle engine stays loaded, None: all."""
    from mtpbuild.runtime.engine.loaded import limit_context
    from mtpbuild.runtime.limits import measure_limits
    from mtpbuild.runtime.sampling.defaults import choose_sampling_defaults
    from mtpbuild.runtime.server.on_demand import EngineMemory, OnDemandService
    from mtpbuild.runtime.server.service import Service, Services

    memory = EngineMemory(measure_limits().memory)
    services = list[Service]()
    if len(engines) > 1 and settings.chat_template is not None:
        raise UsageError("--chat-template is for one engine: build the others with theirs")
    for name, (folder, whole) in engines.items():
        try:
            manifest = limit_context(whole, settings.max_seq_len)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None
        rows = settings.prefix_cache_dir
        if rows is not None and len(engines) > 1:  # each belongs to one engine alone
            # quoted, so that `x/y` and `x_y` differ and `..` stays in the folder
            rows /= re.sub(r"^\.", "%2E", quote(name, safe=""))
        own_settings = replace(
            settings,
            served_model_name=name,
            defaults=choose_sampling_defaults(folder, manifest),
            prefix_cache_dir=rows,
        )
        load_one = partial(load, own_settings, folder)
        if keep is None:
            services.append(Service(own_settings, load_one))
        elif manifest.split:
            raise UsageError(
                f"{folder}: an engine of several ranks is served alone, without --keep"
            )
        else:
            services.append(OnDemandService(own_settings, load_one, manifest, memory, keep))
    if keep is not None:
        print(memory.describe(), file=sys.stderr, flush=True)
    return Services(*services)


def _load(
    settings: ServerOptions, folder: Path, *, verify_hashes: bool, **options: object
) -> "Engine":
    from mtpbuild.runtime import SamplingParams, StructuredOutputs

    loaded = settings.load_engine(folder, verify_hashes=verify_hashes, **options)
    # The first grammar reads the vocabulary, up to a second: do it before the first request.
    with contextlib.suppress(MtpbuildError):
        loaded.check(SamplingParams(structured_outputs=StructuredOutputs(choice=("yes",))))
    return loaded
