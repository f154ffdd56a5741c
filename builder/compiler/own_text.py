"""Calibrate a view of a checkpoint with the model's own texts, or with those of a file."""

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path

from mtpbuild.builder.models import ModelConfig
from mtpbuild.builder.plan.recipe import BUILT_IN, find_built_in, find_model, find_recipe_folder
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.program.opened_model import OpenedModel
from mtpbuild.builder.stages import Stages, Watch, say_time_left
from mtpbuild.builder.weights.calibration import LEAST_TOKENS, Calibration
from mtpbuild.builder.weights.layer_passes import make_batches
from mtpbuild.builder.weights.quantised_view import QuantisedView
from mtpbuild.builder.weights.scheme import OWN_TEXT, build_scheme
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.configuration.input_file import FileRequest, generate_all, read_requests
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.text.tokenizer import TOKENIZER, read_backend

TOKENS = 1 << 14  # of all texts; more of them take time and change little
PIECE = 512  # tokens of a file's text that go through the model together
HELD_OUT = 12  # the first built-in prompts of each kind only measure
ANSWER, CONTEXT, AT_ONCE = 128, 1024, 8  # tokens of an answer, of a whole text; answers at a time
FLAG = "--calibration-text"
INPUTS, TEXTS, WRITER = "inputs", "texts.jsonl", "writer"

logger = logging.getLogger(__name__)
Texts = list[list[int]]
Build = Callable[[BuildRequest, Stages], object]


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    """A model's answer to a prompt as token ids, with its steps and the drafts they accepted."""

    prompt: list[int]
    answer: list[int]
    steps: int
    accepted: int


def calibrate(
    view: QuantisedView,
    config: ModelConfig,
    request: BuildRequest,
    out: Path,
    inputs: str,
    stages: Stages,
    build: Build,
) -> QuantisedView:
    """Return a view whose int4 weights are calibrated, with the parts in a folder beside `out`.

    request: names the model, and builds the engine that writes its texts with `build`. inputs: what
    a calibration that was cut off must have had to be continued.
    """
    open_state(folder := find_state_folder(out), inputs, discard=request.force)
    texts = _choose_texts(request, folder, stages, build)
    with stages("calibrate"):
        calibration = Calibration(view, config, make_batches(texts), folder, stages.watch)
        done = calibration.run()
    _log_calibrated(calibration, done)
    return done


def calibrate_model(
    model: OpenedModel, request: BuildRequest, out: Path, inputs: str, stages: Stages, build: Build
) -> OpenedModel:
    """Return the model with calibrated weights; the arguments are those of `calibrate`."""
    view = model.checkpoint
    assert isinstance(view, QuantisedView)
    if view.calibrated:
        return model
    view = calibrate(view, model.config, request, out, inputs, stages, build)
    return replace(model, checkpoint=view)


def _log_calibrated(calibration: Calibration, done: QuantisedView) -> None:
    wanted, known = calibration.wanted, done.calibrated
    tokens = sum(batch.numel() for batch in calibration.batches)
    figures = f"{len(known):,} of {len(wanted):,} int4 weights with {tokens:,} tokens"
    logger.warning("note: calibrated %s", figures)
    if rare := [name for name in wanted if name not in known]:
        logger.warning(
            "note: %s int4 weights are rounded as without calibration: fewer than %s tokens reach "
            "them (%s, ..)",
            f"{len(rare):,}",
            LEAST_TOKENS,
            rare[0],
        )


def find_state_folder(out: Path) -> Path:
    """Return the folder of a calibration that is not finished."""
    return out.resolve().parent / f".{out.resolve().name}.calibration"


def discard_calibration(out: Path) -> None:
    shutil.rmtree(find_state_folder(out), ignore_errors=True)


def open_state(folder: Path, inputs: str, *, discard: bool) -> None:
    """Make a folder for what is not finished; empty it if it is of other inputs (or `discard`)."""
    path = folder / INPUTS
    if discard or not path.is_file() or path.read_text(encoding="utf-8") != inputs:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        path.write_text(inputs, encoding="utf-8")


def _choose_texts(request: BuildRequest, folder: Path, stages: Stages, build: Build) -> Texts:
    """Return the texts of a file, or those that the model writes."""
    assert request.scheme is not None
    given = request.scheme.calibration
    assert given is not None
    if given != OWN_TEXT and not given.endswith(".jsonl"):
        model = find_model(request.model, request.checkpoint, request.revision)
        return _cut(Path(given), model.folder)
    path = folder / TEXTS
    if not path.is_file():
        _write(None if given == OWN_TEXT else Path(given), request, folder, stages, build)
    return [each.prompt + each.answer for each in read_answers(path)]


def _cut(path: Path, folder: Path) -> Texts:
    """Cut a file's text into pieces of tokens; raise UsageError if it can't be read."""
    try:
        text = path.read_text(encoding="utf-8")
        ids = read_backend(folder / TOKENIZER).encode(text).ids
    except (OSError, ValueError) as error:
        raise UsageError(f"{FLAG} {path}: can't be read ({error})") from None
    pieces = [ids[i : i + PIECE] for i in range(0, min(len(ids), TOKENS), PIECE)]
    if not pieces:
        raise UsageError(f"{FLAG} {path}: no text is in it")
    return pieces


def _write(
    prompts: Path | None, request: BuildRequest, folder: Path, stages: Stages, build: Build
) -> None:
    """Let the model answer a file's prompts, or the package's, with plain int4 weights."""
    out = folder / WRITER
    writer = BuildRequest(
        request.model,
        nextn=(0,),
        layers=request.layers,
        scheme=build_scheme("int4"),
        max_batch=AT_ONCE,
        max_seq_len=CONTEXT,
        out=out,
        checkpoint=request.checkpoint,
        revision=request.revision,
    )
    with stages("write texts"):
        build(writer, Stages(lambda stage: stages.watch(f"write texts: {stage}")))
        with Engine.load(out, prefix_cache=False) as engine:
            write_answers(
                engine, [*_take_some(_read_prompts(prompts, engine))], folder / TEXTS, stages.watch
            )
    shutil.rmtree(out, ignore_errors=True)


def write_answers(engine: Engine, requests: list[FileRequest], path: Path, watch: Watch) -> None:
    """Write the engine's answers to a file, a line each, which gets its name when it is whole.

    Answers that an earlier run has written stay.
    """
    new, start = path.with_suffix(".new"), time.monotonic()
    whole, end, _ = new.read_text(encoding="utf-8").rpartition("\n") if new.exists() else ("",) * 3
    new.write_text(whole + end, encoding="utf-8")  # without a line that was cut off
    done = len(whole.splitlines())
    with new.open("a", encoding="utf-8", buffering=1) as file:
        answers = generate_all(engine, requests[done:])
        for made, (asked, result) in enumerate(answers, start=1):
            found = result.metrics.speculative_decoding
            counts = found.num_spec_steps, found.num_accepted_draft_tokens
            answer = OwnAnswer(asked.token_ids, result.token_ids, *counts)
            file.write(json.dumps(asdict(answer)) + "\n")
            left = say_time_left(start, made, len(requests) - done - made)
            watch(f"write texts: {done + made} of {len(requests)}{left}")
    new.replace(path)


def read_answers(path: Path) -> list[OwnAnswer]:
    return [OwnAnswer(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _read_prompts(path: Path | None, engine: Engine) -> list[FileRequest]:
    """Read a file's prompts, or some of the package's three kinds in turn."""
    params = SamplingParams(max_tokens=ANSWER, temperature=1.0)
    if path is not None:
        return read_requests(path, engine, params, FLAG)
    if engine.tokenizer is None:
        raise UsageError(f"--calibrate: the model has no tokenizer: give {FLAG} with input_ids")
    chats = engine.tokenizer.chat_template is not None
    code, reasoning = (find_built_in(name) for name in BUILT_IN)
    kinds = [read_requests(code, engine, params)[HELD_OUT:]]
    if chats:
        kinds.append(
            read_requests(find_recipe_folder() / "calibration" / "prompts.jsonl", engine, params)
        )
        kinds.append(read_requests(reasoning, engine, params)[HELD_OUT:])
    return [request for turn in zip_longest(*kinds) for request in turn if request is not None]


def _take_some(requests: list[FileRequest]) -> Iterator[FileRequest]:
    """Yield as many requests as `TOKENS` allows, each with a short answer and a seed."""
    total = 0
    for number, request in enumerate(requests):
        own = replace(
            request.params, max_tokens=min(ANSWER, request.params.max_tokens), seed=number
        )
        total += len(request.token_ids) + own.max_tokens
        if total > TOKENS:
            return
        yield replace(request, params=own)
