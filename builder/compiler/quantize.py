"""`mtpbuild quantize`: read a checkpoint weight by weight and write it in other number formats."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from mtpbuild.builder.checkpoint.readable import MODELOPT
from mtpbuild.builder.checkpoint.side_files import CONFIG, copy_side_files
from mtpbuild.builder.compiler.calibrate import calibrate, discard_calibration
from mtpbuild.builder.compiler.fingerprint import hash_files, hash_samples
from mtpbuild.builder.compiler.flag_checks import check_calibration
from mtpbuild.builder.compiler.workbench import Workbench
from mtpbuild.builder.engine.staged import is_taken, stage_folder
from mtpbuild.builder.formats import FORMATS, Format, make_entry
from mtpbuild.builder.formats.integers import count_coarse_blocks
from mtpbuild.builder.models import ModelConfig, find_family_of, load_config
from mtpbuild.builder.models.common.weight import StoredTensor
from mtpbuild.builder.plan.machine import explain_small_disk
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages, Watch, ignore
from mtpbuild.builder.weights.checkpoint import Loss
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.builder.weights.placed import split_into_shards, write_shards
from mtpbuild.builder.weights.quantised_view import Parts, QuantisedView, requantise
from mtpbuild.builder.weights.scheme import OWN_TEXT, Scheme
from mtpbuild.runtime.errors import BuildError
from mtpbuild.runtime.files import read_json


@dataclass(frozen=True)
class QuantizeRequest:
    """The flags of `mtpbuild quantize`."""

    model: str
    scheme: Scheme
    out: Path
    checkpoint: Path | None = None
    force: bool = False


@dataclass
class Portion:
    """The weights of a checkpoint in one format: their number, bytes and quantisation loss."""

    weights: int = 0
    bytes: int = 0
    loss: Loss = field(default_factory=Loss)


@dataclass
class Quantized:
    """A written checkpoint: a portion per format, and the weights whose columns fit no block."""

    folder: Path
    portions: dict[str, Portion] = field(default_factory=lambda: defaultdict(Portion))
    unfit: list[str] = field(default_factory=list)
    coarse: int = 0  # blocks of integers that lose accuracy


def quantize(request: QuantizeRequest, bench: Workbench, watch: Watch = ignore) -> Quantized:
    """Write the quantised checkpoint.

    Raises UsageError, CheckpointError or BuildError; then nothing is left behind but the finished
    layers of a calibration.
    """
    source = find_model(request.model, request.checkpoint)
    refuse_taken_folder(request.out, source.folder, force=request.force)
    config = load_config(source.folder)
    check_calibration(request.scheme, config)
    checkpoint = open_checkpoint(source.folder)
    config = checkpoint.settle(config)
    weights = checkpoint.check(config).stored
    for copy, original in find_family_of(config).duplicates(config).items():
        if copy in checkpoint.tensors:
            weights.setdefault(copy, StoredTensor(copy, weights[original].shape))
    new = requantise(checkpoint, config, request.scheme, weights.values())
    if why := explain_small_disk(request.out, sum(e.nbytes for e in new.tensors.values())):
        raise BuildError(f"{request.model}: {why}")
    done = Quantized(request.out, unfit=list(new.unfit))
    with stage_folder(request.out, "checkpoint") as building:
        if request.scheme.calibration is not None:
            new = calibrate_view(request, new, config, source.folder, bench, watch)
        write_shards(building.folder, split_into_shards(new.tensors), encode_all(new, done, watch))
        write_configuration(source.folder, building.folder, config, request.scheme)
    discard_calibration(request.out)
    return done


def calibrate_view(
    request: QuantizeRequest,
    view: QuantisedView,
    config: ModelConfig,
    source: Path,
    bench: Workbench,
    watch: Watch,
) -> QuantisedView:
    """Return the view with calibrated int4 weights."""
    asked = BuildRequest(
        request.model, scheme=request.scheme, checkpoint=request.checkpoint, force=request.force
    )
    text = request.scheme.calibration
    read = {} if text in (None, OWN_TEXT) else {text: hash_samples(Path(text))}
    inputs = json.dumps([hash_files(source), read, str(request.scheme)], sort_keys=True)
    return calibrate(view, config, asked, request.out, inputs, bench, Stages(watch))


def encode_all(
    checkpoint: QuantisedView, done: Quantized, watch: Watch
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors to store, by name; add up their bytes and losses in `done`."""
    for number, (name, format) in enumerate(checkpoint.formats.items(), 1):
        watch(f"quantising weight {number:,} of {len(checkpoint.formats):,}")
        if format is None:
            parts = {"": checkpoint.tensor(name)}
            portion = done.portions[make_entry(parts[""]).dtype.lower()]
        else:
            portion = done.portions[format.name]
            pieces = add_losses(checkpoint.encoded(name), format, portion)
            parts = checkpoint.collect(name, pieces)
        portion.weights += 1
        for suffix, tensor in parts.items():
            portion.bytes += tensor.nbytes
            done.coarse += count_coarse_blocks(tensor) if format is not None else 0
            yield name + suffix, tensor


def add_losses(
    pieces: Iterable[tuple[Tensor, Parts]], format: Format, portion: Portion
) -> Iterator[Parts]:
    """Yield the encoded parts of each piece of rows; add up their losses in `portion`."""
    for rows, parts in pieces:
        portion.loss = portion.loss.after(rows, parts, format)
        yield parts


def write_configuration(source: Path, folder: Path, config: ModelConfig, scheme: Scheme) -> None:
    """Write config.json as published checkpoints of the format have it, and copy the side files."""
    copy_side_files(source, folder)
    raw = read_json(source / CONFIG)
    raw.pop("quantization_config", None)
    if scheme.main == "nvfp4":
        quantization = {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": FORMATS[scheme.main].block,
            "exclude_modules": scheme.exclude_modules(config),
        }
        algorithm = {"producer": {"name": "mtpbuild"}, "quantization": quantization}
        write_json(folder / MODELOPT, algorithm)
    elif scheme.main is not None:
        raw["quantization_config"] = quantization_config(scheme)
    write_json(folder / CONFIG, raw)


def quantization_config(scheme: Scheme) -> dict[str, Any]:
    assert scheme.main is not None
    block = FORMATS[scheme.main].block
    if scheme.main == "fp8":
        blocks = [block, block]
        details = {"fmt": "e4m3", "weight_block_size": blocks, "activation_scheme": "dynamic"}
        return {"quant_method": "fp8"} | details
    head = {} if scheme.head is None else {"head": scheme.head}
    return {"quant_method": "mtpbuild", "fmt": scheme.main, "block_size": block} | head


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def refuse_taken_folder(out: Path, source: Path, *, force: bool) -> None:
    """Refuse to overwrite the source, another kind of folder or, without --force, a checkpoint."""
    if out.resolve() == source.resolve():
        raise BuildError(f"{out} is the source itself; choose another --out")
    if is_taken(out, CONFIG, "a checkpoint") and not force:
        raise BuildError(f"{out} holds a checkpoint; use --force to replace it")
