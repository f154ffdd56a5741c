"""`mtpbuild tune-head`: train a model's MTP modules for prompts like those of a file.

The model answers the prompts itself, so that the modules learn to guess what it says.
"""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mtpbuild.builder.compiler.build import build
from mtpbuild.builder.compiler.calibrate import open_state
from mtpbuild.builder.compiler.draft_vocab import write_draft_ids
from mtpbuild.builder.compiler.fingerprint import hash_samples
from mtpbuild.builder.compiler.plans import Plans, plan_engines
from mtpbuild.builder.compiler.quantize import refuse_taken_folder, write_json
from mtpbuild.builder.compiler.source import ModelSource
from mtpbuild.builder.engine.staged import stage_folder
from mtpbuild.builder.flags import TuneFlags
from mtpbuild.builder.formats import Entry
from mtpbuild.builder.models import ModelConfig, find_family_of, load_config
from mtpbuild.builder.models.common.plain import PlainCausalLM
from mtpbuild.builder.plan.machine import find_disk, measure_memory
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages
from mtpbuild.builder.weights.layer_passes import (
    LayerPass,
    LayerPasses,
    StreamedModel,
    make_batches,
)
from mtpbuild.builder.weights.placed import split_into_shards, write_shards
from mtpbuild.builder.weights.quantised_view import Parts
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.lab.measure.own_texts import OwnAnswer, read_answers, write_answers
from mtpbuild.lab.measure.prompts import add_seed, check_room
from mtpbuild.lab.measure.workbench import WORKBENCH
from mtpbuild.lab.tune.new_head import (
    BY_MODEL,
    PROMPTS,
    write_config,
    write_new_head,
    write_prompts,
)
from mtpbuild.lab.tune.training import DTYPES, Trainer, Training, make_model_batches
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.checks import check_one_of, in_range
from mtpbuild.runtime.configuration.input_file import (
    FileRequest,
    InputLine,
    read_lines,
    read_requests,
)
from mtpbuild.runtime.contract.drafters import EAGLE, VANILLA
from mtpbuild.runtime.contract.manifest import MAX_SEQ_LEN
from mtpbuild.runtime.errors import RequestError, UsageError
from mtpbuild.runtime.files import format_size
from mtpbuild.runtime.requests.stats import compute_acceptance_length

REPORT = "tune_head.json"
FLAG = "--data"
ANSWERS, BEFORE, AFTER = "answers.jsonl", "before.jsonl", "after.jsonl"
AT_ONCE = 8  # answers
LR = 0.4  # the default learning rate, times the hidden size

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TuneRequest(TuneFlags):
    """A request of `mtpbuild tune-head`."""

    model: str
    out: Path

    @property
    def writer(self) -> Path:
        """The engine that answers before the training."""
        return self.state / "engine"

    @property
    def measured(self) -> Path:
        """The engine that answers with the new head."""
        return self.state / "tuned"

    @property
    def prompts(self) -> Path:
        """The file of prompts, which the model may have to write first."""
        return self.state / PROMPTS if self.data is None else self.data

    @property
    def head(self) -> Path | None:
        """The head to begin with; None: the checkpoint's."""
        return self.state / "new" if self.new else self.mtp

    @property
    def state(self) -> Path:
        """The folder of what is not finished."""
        return self.out.resolve().parent / f".{self.out.resolve().name}.tuning"

    def writer_request(self) -> BuildRequest:
        """Return the request for the engine that answers: it drafts if the model can."""
        if not self.new:
            return self.drafting_request(self.writer, self.mtp)
        return replace(self.drafting_request(self.writer, None), nextn=(0,), drafter=None)

    def drafting_request(self, out: Path, head: Path | None) -> BuildRequest:
        """Return the request for an engine that drafts with a head."""
        return BuildRequest(
            self.model,
            nextn=(in_range(self.nextn, 1, 15, "--nextn"),),
            drafter=self.drafter,
            scheme=build_scheme(self.weights),
            max_batch=AT_ONCE,
            mtp=head,
            out=out,
        )


@dataclass(frozen=True)
class TunedHead:
    """A written head, and its acceptance length on held-out prompts beside the one before."""

    drafter: str
    nextn: int
    before: float
    after: float
    prompts: int  # held out
    same: int  # of their texts
    texts: int  # that it was trained on
    tokens: int
    steps: int
    accepted: list[float]  # share of held-out drafts, by position, of the weights that were kept


def tune_head(request: TuneRequest, stages: Stages) -> TunedHead:
    """Train the MTP modules and write them to a folder that `build --mtp` and `refit --mtp` take.

    What is finished stays when it is cut off, and the next run of the same request goes on. Raises
    UsageError, CheckpointError or BuildError.
    """
    # 1. What to train: the modules of the model, as an engine's drafter uses them.
    plans, how, inputs = check_request(request)
    check_model(plans.source, how, request)
    open_state(request.state, inputs, discard=request.force)

    # 2. The model's own answers, some of which only measure.
    with stages("write texts"):
        answers, before = write_texts(request, plans.request, stages)
    texts, held_out = (
        sorted(some, key=lambda answer: len(answer.prompt + answer.answer))
        for some in (answers, before)
    )
    batches, others = (
        make_batches(answer.prompt + answer.answer for answer in some) for some in (texts, held_out)
    )
    if request.draft_vocab is not None:
        how = replace(how, draft_ids=list_commonest(answers, request.draft_vocab))

    # 3. The trunk's hidden states over them.
    if request.new and not (new := request.state / "new").is_dir():
        write_new_head(plans.open_model("meta").stored, plans.source, new)
    drafting = plan_engines(request.drafting_request(request.measured, request.head))
    model = drafting.open_model("meta")
    with stages("hidden states"):
        trunk = StreamedModel(model.checkpoint, model.config, batches + others)
        files = write_hidden(trunk, how, request.state, stages)

    # 4. The training, of the weights as they are stored.
    with stages("train"):
        known = StreamedModel(model.stored, model.config, batches + others)
        firsts = [len(answer.prompt) - 1 for answer in texts + held_out]
        rows = make_model_batches(known, firsts, files)
        seen, unseen = rows[: len(batches)], rows[len(batches) :]
        trainer = Trainer(known, seen, how, request.state, stages.watch, unseen)
        weights = trainer.run()

    # 5. The head, and what it is worth: an engine with it.
    with stage_folder(request.out, "head") as staged:
        write_head(known, weights, staged.folder)
        write_config(plans.source, model.stored, staged.folder)
        write_draft_ids(how.draft_ids, staged.folder)
        with stages("measure"):
            engine = request.drafting_request(request.measured, staged.folder)
            build(engine, WORKBENCH, Stages(lambda stage: stages.watch(f"measure: {stage}")))
            after = measure(request, stages)
        report = TunedHead(
            EAGLE if how.eagle else VANILLA,
            how.nextn,
            tokens_per_step(before),
            tokens_per_step(after),
            len(before),
            sum(one.answer == other.answer for one, other in zip(before, after, strict=True)),
            len(answers),
            sum(batch.numel() for batch in batches),
            how.epochs * len(batches),
            trainer.best,
        )
        training = asdict(how) | {"draft_ids": len(how.draft_ids)}
        write_json(staged.folder / REPORT, asdict(report) | {"training": training})
    shutil.rmtree(request.state)
    return report


def check_request(request: TuneRequest) -> tuple[Plans, Training, str]:
    """Check what needs no weights; return the plans, the training, and their inputs."""
    check_one_of(request.dtype, DTYPES, "--dtype")
    if request.lr is not None and not 0 < request.lr <= 1:
        raise UsageError(f"--lr {request.lr:g} must be above 0 and at most 1")
    in_range(request.epochs, 1, 10_000, "--epochs")
    in_range(request.max_tokens, 1, MAX_SEQ_LEN, "--max-tokens")
    in_range(1 if request.lora is None else request.lora, 1, 4096, "--lora")
    count = count_prompts(request)
    in_range(1 if request.held_out is None else request.held_out, 1, count - 1, "--held-out")
    plans = plan_engines(request.writer_request())
    refuse_taken_folder(request.out, plans.source.folder, force=request.force)
    if request.new:
        check_new(request, plans.source.config)
    if request.draft_vocab is not None:
        in_range(request.draft_vocab, 1, plans.source.config.vocab_size - 1, "--draft-vocab")
    drafter = EAGLE if request.new else plans.engines[plans.first].drafter
    if drafter not in (EAGLE, VANILLA):
        raise UsageError(f"--drafter {drafter} is not trained; supported: {EAGLE}, {VANILLA}")
    lr = LR / plans.source.config.hidden_size if request.lr is None else request.lr
    how = Training(
        request.nextn,
        drafter == EAGLE,
        request.lora,
        request.dtype,
        lr,
        request.epochs,
        plans.engines[plans.first].draft_ids,
    )
    [fingerprint] = plans.take_fingerprints().fingerprints.values()
    prompts = request.prompts_by_model if request.data is None else hash_samples(request.data)
    read = [prompts, request.max_tokens, request.held_out, request.draft_vocab, request.new]
    return plans, how, json.dumps([fingerprint, read, asdict(how)])


def count_prompts(request: TuneRequest) -> int:
    """Return the number of prompts that are there or asked for; raise UsageError if too few."""
    if (request.data is None) == (request.prompts_by_model is None):
        raise UsageError(f"give {FLAG} FILE or {BY_MODEL} N, one of them")
    if request.data is None:
        return in_range(request.prompts_by_model or 0, 2, 10**7, BY_MODEL)
    lines = read_lines(request.data, f"{FLAG} {request.data}", InputLine, refuse_answer)
    if len(lines) < 2:
        raise UsageError(f"{FLAG} {request.data}: has one prompt, and needs others to measure with")
    return len(lines)


def check_new(request: TuneRequest, config: ModelConfig) -> None:
    """Raise UsageError if a new module is not what the model lacks."""
    if request.mtp is not None:
        raise UsageError("--new begins with a module of its own: leave --mtp out")
    if request.drafter not in (None, EAGLE):
        raise UsageError(f"--new makes one module, which drafts by --drafter {EAGLE}")
    if config.num_nextn_predict_layers:
        raise UsageError(f"{request.model} has MTP modules: leave --new out")


def list_commonest(answers: Sequence[OwnAnswer], count: int) -> tuple[int, ...]:
    """Return the ids of the commonest tokens of answers, in rising order."""
    counts = Counter(token for answer in answers for token in answer.answer)
    return tuple(sorted(token for token, _ in counts.most_common(count)))


def refuse_answer(line: InputLine, number: int) -> InputLine:
    """Return a line; raise RequestError if its conversation ends with an answer."""
    if line.messages and line.messages[-1].get("role") == "assistant":
        raise RequestError("its last message is an answer, which the model gives: leave it out")
    return line


def check_model(source: ModelSource, how: Training, request: TuneRequest) -> None:
    """Say how much memory the training takes; raise UsageError if the machine has less."""
    config = load_config(source.folder, modules=1) if request.new else source.config
    if config.head:
        raise UsageError(
            f"--mtp {request.mtp}: {config.head.title} is not trained, MTP modules are"
        )
    family = find_family_of(config)
    with torch.device("meta"):
        plain = family.reference(config)
    if not isinstance(plain, PlainCausalLM):
        raise UsageError(f"{family.name}: what drafts for it is published, and not trained here")
    if request.draft_vocab is not None and config.own_heads:
        raise UsageError("--draft-vocab: the modules have heads of their own: leave it out")
    if how.eagle and any(hasattr(part, "chooser") for part in plain.module(1).modules()):
        raise UsageError(
            f"the module of {family.name} chooses the rows that it attends to, so "
            "it is trained for one draft: give --nextn 1 --drafter mtp-vanilla"
        )
    if not family.runs_by_layer(config):
        raise UsageError(f"{family.name}: its layers can't run one by one, as a training needs")
    drafted = request.draft_vocab or len(how.draft_ids) or config.vocab_size
    needed, there = how.memory(plain, drafted), measure_memory()
    if there is not None and needed > there:
        smaller = "" if how.lora else ": --lora 16 takes less"
        raise UsageError(
            f"the training takes about {format_size(needed)} of memory, and this machine has "
            f"{format_size(there)}{smaller}"
        )
    logger.warning("note: the training takes about %s of memory", format_size(needed))


def write_texts(
    request: TuneRequest, engine: BuildRequest, stages: Stages
) -> tuple[list[OwnAnswer], list[OwnAnswer]]:
    """Let an engine answer all prompts; return the answers to train on and the held-out ones."""
    paths = [request.state / name for name in (ANSWERS, BEFORE)]
    if not all(path.is_file() for path in paths):
        build(engine, WORKBENCH, Stages(lambda stage: stages.watch(f"write texts: {stage}")))
        with Engine.load(request.writer, prefix_cache=False) as loaded:
            if request.data is None and not request.prompts.is_file():
                count = request.prompts_by_model or 0
                least = 2 if request.held_out is None else request.held_out + 1
                write_prompts(loaded, count, least, request.state, stages.watch)
            for requests, path in zip(split_requests(request, loaded), paths, strict=True):
                if not path.is_file():
                    write_answers(loaded, requests, path, stages.watch)
    answers, before = map(read_answers, paths)
    return answers, before


def measure(request: TuneRequest, stages: Stages) -> list[OwnAnswer]:
    """Let the engine answer the held-out prompts."""
    with Engine.load(request.measured, prefix_cache=False) as engine:
        _, held_out = split_requests(request, engine)
        write_answers(engine, held_out, request.state / AFTER, stages.watch)
    return read_answers(request.state / AFTER)


def split_requests(
    request: TuneRequest, engine: Engine
) -> tuple[list[FileRequest], list[FileRequest]]:
    """Return the requests to train on, and those held out, which are spread over the file.

    A prompt that is held out is not trained on, even if it stands in the file twice.
    """
    params = SamplingParams(max_tokens=request.max_tokens)
    requests = read_requests(request.prompts, engine, params, FLAG, check=True)
    for number, item in enumerate(requests):
        check_room(engine, len(item.token_ids), item.params.max_tokens, f"{FLAG} {item.task_id}: ")
        requests[number] = replace(item, params=add_seed(item.params, number))
    count = request.held_out or max(1, len(requests) // 10)
    held_out = [requests[i] for i in sorted({i * len(requests) // count for i in range(count)})]
    known = {(*item.token_ids,) for item in held_out}
    others = [item for item in requests if (*item.token_ids,) not in known]
    if not others:
        raise UsageError(f"{request.prompts}: all its prompts are held out, so it needs more")
    return others, held_out


def write_hidden(model: StreamedModel, how: Training, folder: Path, stages: Stages) -> list[Path]:
    """Write the trunk's hidden states, as modules read them, to a file per batch."""
    width = model.config.hidden_size
    dtype = DTYPES[how.dtype]
    size = 8 * width * sum(batch.numel() for batch in model.batches)  # a layer's input and output
    if size > (free := find_disk(folder).free):
        raise UsageError(
            f"{folder}: hidden states take {format_size(size)}, {format_size(free)} are free"
        )

    def layer(i: int, hidden: Iterable[Tensor], parts: Parts) -> Iterator[Tensor]:
        with model.loaded(model.plain.model.layers[i]):
            yield from (model.run_layer(i, x) for x in model.inputs(i, hidden))

    def norm(hidden: Iterable[Tensor], parts: Parts) -> Iterator[Tensor]:
        yield from (x.to(dtype) for x in model.run_norm(hidden))

    steps: list[tuple[str, LayerPass]] = [
        (f"hidden states of layer {i}", partial(layer, i))
        for i in range(model.config.num_hidden_layers)
    ]
    steps.append(("hidden states, normed", norm))
    run = LayerPasses(folder, stages.watch)
    with torch.no_grad():
        run.run(steps)
    return run.files(len(steps) - 1)


def write_head(model: StreamedModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write all modules: floats as they are stored, what was quantised in bf16."""
    stored = model.checkpoint
    entries = dict[str, Entry]()

    def find_dtype(name: str) -> str:
        entry = stored.tensors.get(name)
        floats = entry is not None and entry.floats and stored.format(name) is None
        return entry.dtype if entry is not None and floats else "BF16"

    for k in range(1, model.config.num_nextn_predict_layers + 1):
        module = model.plain.module(k)
        for part, weight in module.state_dict().items():
            name = f"{model.name_of(module)}.{part}"
            entries[name] = Entry(find_dtype(name), tuple(weight.shape))
    read = ((n, weights[n] if n in weights else stored.read(n)) for n in entries)
    write_shards(folder, split_into_shards(entries), read)


def tokens_per_step(answers: Sequence[OwnAnswer]) -> float:
    """Return how many tokens a step emits; 1 if all answers ended before the first step."""
    tokens = sum(len(answer.answer) for answer in answers)
    return compute_acceptance_length(tokens, sum(answer.steps for answer in answers)) or 1.0
