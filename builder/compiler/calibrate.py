"""Calibrate the int4 weights of a view of a checkpoint by texts."""

import logging
import shutil
from pathlib import Path

from mtpbuild.builder.compiler.workbench import Workbench
from mtpbuild.builder.models import ModelConfig
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages
from mtpbuild.builder.weights.calibration import LEAST_TOKENS, Calibration
from mtpbuild.builder.weights.checkpoint import Checkpoint
from mtpbuild.builder.weights.layer_passes import make_batches
from mtpbuild.builder.weights.quantised_view import QuantisedView
from mtpbuild.builder.weights.scheme import OWN_TEXT, build_scheme
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.text.tokenizer import TOKENIZER, read_backend

MAX_TOKENS = 1 << 14  # of a file, or of what the model writes; more take time and change little
PIECE = 512  # tokens of a file's text that go through the model together
CONTEXT, AT_ONCE = 1024, 8  # tokens of a whole text that the model writes; texts at a time
FLAG = "--calibration-text"
INPUTS, WRITER = "inputs", "writer"
SOURCES, COUNT = Path(__file__).parents[1], 48  # files, and how many
LONG_FILE, SHORT = 3000, 256  # their characters at least; tokens of their beginning

logger = logging.getLogger(__name__)


def calibrate(
    view: Checkpoint | QuantisedView,
    config: ModelConfig,
    request: BuildRequest,
    out: Path,
    inputs: str,
    bench: Workbench,
    stages: Stages,
) -> QuantisedView:
    """Return a view whose int4 weights are calibrated, with the parts in a folder beside `out`.

    request: names the model and its texts. inputs: what a calibration that was cut off must have
    had to be continued.
    """
    assert isinstance(view, QuantisedView)
    open_state(folder := state_folder(out), inputs, discard=request.force)
    texts = read_texts(request, folder, bench, stages)
    with stages("calibrate"):
        calibration = Calibration(view, config, make_batches(texts), folder, stages.watch)
        calibrated = calibration.run()
    log_calibrated(calibration, calibrated)
    return calibrated


def log_calibrated(calibration: Calibration, calibrated: QuantisedView) -> None:
    wanted, known = calibration.wanted, calibrated.calibrated
    tokens = sum(batch.numel() for batch in calibration.batches)
    figures = f"{len(known):,} of {len(wanted):,} int4 weights with {tokens:,} tokens"
    logger.warning("note: calibrated %s", figures)
    if rare := [name for name in wanted if name not in known]:
        why = f"fewer than {LEAST_TOKENS} tokens reach them ({rare[0]}, ..)"
        plainly = "int4 weights are rounded as without calibration"
        logger.warning("note: %s %s: %s", f"{len(rare):,}", plainly, why)


def state_folder(out: Path) -> Path:
    """Return the folder of a calibration that is not finished."""
    return out.resolve().parent / f".{out.resolve().name}.calibration"


def discard_calibration(out: Path) -> None:
    shutil.rmtree(state_folder(out), ignore_errors=True)


def open_state(folder: Path, inputs: str, *, discard: bool) -> None:
    """Make a folder for what is not finished; empty it if it is of other inputs (or `discard`)."""
    path = folder / INPUTS
    if discard or not path.is_file() or path.read_text(encoding="utf-8") != inputs:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        path.write_text(inputs, encoding="utf-8")


def read_texts(
    request: BuildRequest, folder: Path, bench: Workbench, stages: Stages
) -> list[list[int]]:
    """Return the texts of a file, or those that the model writes with plain int4 weights."""
    text = request.calibration
    assert text is not None
    model = find_model(request.model, request.checkpoint, request.revision)
    if text != OWN_TEXT and not text.endswith(".jsonl"):
        return cut_text(Path(text), model.folder)
    writer = BuildRequest(
        request.model,
        nextn=(0,),
        layers=request.layers,
        scheme=build_scheme("int4"),
        max_batch=AT_ONCE,
        max_seq_len=CONTEXT,
        out=folder / WRITER,
        checkpoint=request.checkpoint,
        revision=request.revision,
    )
    if text != OWN_TEXT:
        return bench.write_texts(writer, Path(text), folder, stages)
    return bench.write_texts(writer, None, folder, stages) + cut_sources(model.folder)


def cut_sources(folder: Path) -> list[list[int]]:
    """Return the beginnings of files of this package, in tokens: code and English of others.

    What a model writes is too much alike to calibrate with alone.
    """
    files = sorted(p for p in SOURCES.rglob("*.py") if p.stat().st_size > LONG_FILE)
    texts = (files[i * len(files) // COUNT].read_text(encoding="utf-8") for i in range(COUNT))
    tokenizer = read_backend(folder / TOKENIZER)
    return [tokenizer.encode(text[:LONG_FILE]).ids[:SHORT] for text in texts]


def cut_text(path: Path, folder: Path) -> list[list[int]]:
    """Cut a file's text into pieces of tokens; raise UsageError if it can't be read."""
    try:
        text = path.read_text(encoding="utf-8")
        ids = read_backend(folder / TOKENIZER).encode(text).ids
    except (OSError, ValueError) as error:
        raise UsageError(f"{FLAG} {path}: can't be read ({error})") from None
    pieces = [ids[i : i + PIECE] for i in range(0, min(len(ids), MAX_TOKENS), PIECE)]
    if not pieces:
        raise UsageError(f"{FLAG} {path} has no text")
    return pieces
