"""Put new weights of the same architecture into an engine, without lowering its programs again."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.builder.checkpoint.layers_slice import parse_layers
from mtpbuild.builder.checkpoint.side_files import CONFIG, copy_side_files, is_side_file
from mtpbuild.builder.compiler.draft_vocab import DRAFT_VOCAB, read_ids
from mtpbuild.builder.compiler.manifest_of import describe_files, make_model_info
from mtpbuild.builder.compiler.notes import log_notes
from mtpbuild.builder.compiler.prefixes import remake_prefixes
from mtpbuild.builder.compiler.source import find_source, read_source
from mtpbuild.builder.engine.layout import change_engine
from mtpbuild.builder.models import load_config
from mtpbuild.builder.plan.machine import explain_small_disk
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.program.engine_weights import EngineWeights
from mtpbuild.builder.program.opened_model import OpenedModel
from mtpbuild.builder.program.opened_model import open_model as open_checked
from mtpbuild.builder.stages import Watch, ignore
from mtpbuild.builder.targets import configure_target
from mtpbuild.builder.targets.target import Target
from mtpbuild.builder.weights.drafter_weights import PREFIX, find_brought_files
from mtpbuild.builder.weights.scheme import read_scheme
from mtpbuild.runtime.contract.manifest import (
    MANIFEST,
    PREFIXES,
    WEIGHTS,
    Manifest,
    check_files,
    read_manifest,
)
from mtpbuild.runtime.contract.targets import find_target
from mtpbuild.runtime.errors import BuildError, UsageError
from mtpbuild.runtime.safetensors_header import read_header
from mtpbuild.runtime.text.tokenizer_files import read_template

SHOWN = 6  # differences in one line


def refit(
    engine: Path,
    model: str,
    watch: Watch = ignore,
    mtp: Path | None = None,
    chat_template: Path | None = None,
) -> tuple[Manifest, Manifest]:
    """Replace the weights of `engine` by those of `model`, a checkpoint folder or a recipe's name.

    mtp: a file or folder with the MTP modules, if they lie elsewhere. chat_template: a file in
    place of the checkpoint's templates, as of a build. An engine of some layers gets the same
    layers of `model`; if its build quantised the weights, the new ones are quantised likewise.
    Programs that are loaded keep the weights that they were loaded with. Returns the manifests
    before and after. Raises UsageError with the differences if the checkpoint has another
    architecture or other number formats, CheckpointError or BuildError; the engine is then as it
    was.
    """
    if chat_template is not None:
        read_template(chat_template)
    watch("check engine")
    old = read_manifest(engine)
    check_files(engine, old)
    target = require_refittable_target(engine, old)

    watch("check checkpoint")
    new = open_model(engine, old, model, target, mtp)
    log_notes(new)
    remedy = "free some, or build the engine elsewhere"
    if why := explain_small_disk(engine, new.weight_bytes, remedy):
        raise BuildError(f"{engine}: {why}")

    prefixes = {name for name in old.files if name.startswith(f"{PREFIXES}/")}
    replaced = {name for name in old.files if is_side_file(name)} | {WEIGHTS, CONFIG} | prefixes
    with change_engine(engine, old.files.keys() - replaced) as folder:
        watch("write weights")
        sha256 = EngineWeights(new).write(folder, siblings=engine.resolve().parent).sha256
        refuse(engine, new.source.folder, list(list_tensor_differences(engine, folder)))
        watch("package")
        copy_side_files(new.source.folder, folder, chat_template or new.source.chat_template)
        kept = {n: f.sha256 for n, f in old.files.items() if n not in replaced}
        manifest = describe_refitted(old, new, folder, sha256, kept)
        (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        if prefixes:
            watch("compute prefixes")
            remake_prefixes(engine, folder, old)
    return old, read_manifest(engine)


def require_refittable_target(engine: Path, old: Manifest) -> Target:
    """Return an engine's target; raise UsageError if it can't be refitted."""
    if old.split:
        raise UsageError(f"{engine}: engines of several ranks cannot be refitted; build it again")
    name = old.target.name
    target = configure_target(name, find_target(name).build_flags(old))
    if target.style.embeds_weights:
        raise UsageError(
            f"{engine}: programs of target {old.target.name} hold their weights: rebuild it"
        )
    if old.build.calibrated is not None:
        raise UsageError(f"{engine}: its weights were calibrated: build the new ones")
    if CONFIG not in old.files:
        raise UsageError(f"{engine}: has no {CONFIG} to compare with: rebuild it")
    return target


def describe_refitted(
    old: Manifest, new: OpenedModel, folder: Path, sha256: str, kept: Mapping[str, str]
) -> Manifest:
    """Return the manifest with the new model; sha256: of its weights, kept: of old files."""
    inputs = f"{old.build.fingerprint} refitted with {sha256}"
    fingerprint = hashlib.sha256(inputs.encode()).hexdigest()
    rebuilt = {"fingerprint": fingerprint, "balanced_keys": new.balanced_keys}
    changes = {
        "mtpbuild": version("mtpbuild"),
        "model": make_model_info(new),
        "build": old.build.model_copy(update=rebuilt),
        "files": describe_files(folder, {**kept, WEIGHTS: sha256}),
    }
    return old.model_copy(update=changes)


def open_model(
    engine: Path, old: Manifest, model: str, target: Target, mtp: Path | None
) -> OpenedModel:
    """Open the new model, or the engine's layers of it; raise UsageError if shapes differ."""
    request = BuildRequest(model, mtp=mtp)
    source = find_source(request)
    if head := source.config.head:
        raise UsageError(f"{engine}: {head.title} is not refitted: build the engine anew")
    before = find_config_of(engine, old, mtp)
    wanted, present = (c.num_nextn_predict_layers for c in (before, source.config))
    if old.build.nextn and present < wanted:
        raise UsageError(
            f"{source.folder}: has {present} MTP modules, {engine} was built with {wanted}: "
            "join the head with --mtp FILE_OR_FOLDER"
        )
    refuse(engine, source.folder, list_differences(before, source.config))
    layers = None if old.build.layers is None else parse_layers(old.build.layers)
    if layers is not None:
        source = read_source(replace(request, layers=layers), source)
    brings = any(name.startswith(PREFIX) for name in read_header(engine / WEIGHTS)[0])
    new = open_checked(
        source,
        source.config,
        source.ids,
        target.style,
        layers=layers,
        drafts=old.build.nextn > 0,
        draft_ids=tuple(read_ids(engine / DRAFT_VOCAB)) if old.build.draft_vocab else (),
        brought=find_brought_files(old.build.drafter if brings else None, source.config),
        scheme=read_scheme(old.build),
    )
    if new.weights_type != old.build.weights:
        refuse(engine, source.folder, [f"weights {old.build.weights} -> {new.weights_type}"])
    return new


def find_config_of(engine: Path, old: Manifest, mtp: Path | None) -> ModelConfig:
    """Return an engine's configuration, with the MTP modules that a build joined to its trunk."""
    config, held = load_config(engine), old.model.num_nextn_predict_layers
    joined = mtp is not None or config.num_nextn_predict_layers < held
    return load_config(engine, held) if joined else config


def refuse(engine: Path, checkpoint: Path, differences: list[str]) -> None:
    if differences:
        more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        named = "; ".join(differences[:SHOWN])
        raise UsageError(f"{checkpoint} does not fit {engine}: {named}{more}; build it anew")


def list_differences(old: ModelConfig, new: ModelConfig) -> list[str]:
    """List `name before -> after` for every value of the configurations that differs."""
    before, after = flatten_settings(asdict(old)), flatten_settings(asdict(new))
    return [f"{n} {value} -> {after[n]}" for n, value in before.items() if value != after[n]]


def flatten_settings(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flags: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, dict)
        flags |= flatten_settings(value, f"{name}.") if nested else {prefix + name: value}
    return flags


def list_tensor_differences(old: Path, new: Path) -> Iterator[str]:
    """Yield the differences between two weights files.

    Programs find weights by offset, so names, order, types and shapes must all be the same.
    """
    try:
        before, after = (list(read_header(folder / WEIGHTS)[0].items()) for folder in (old, new))
    except (OSError, ValueError) as error:
        raise BuildError(f"{old / WEIGHTS}: not readable as safetensors ({error})") from None
    if len(before) != len(after):
        yield f"{len(before)} -> {len(after)} tensors"
    for entries in zip(before, after, strict=False):
        if entries[0] != entries[1]:
            yield " -> ".join(f"{name} {e['dtype']} {e['shape']}" for name, e in entries)
