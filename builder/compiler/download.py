"""Download the files that a build reads, the weights after all other checks."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from mtpbuild.builder.checkpoint import readable
from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.builder.checkpoint.hub_cache import MAIN, cache_folder, write_ref
from mtpbuild.builder.checkpoint.shards import INDEX, SINGLE, read_shard_names
from mtpbuild.builder.checkpoint.side_files import CONFIG, is_side_file
from mtpbuild.builder.compiler.job import check_machine, check_small_files
from mtpbuild.builder.compiler.plans import check_flags, cut_layers
from mtpbuild.builder.gguf.choice import ENDING, choose_head, choose_model, name_one
from mtpbuild.builder.models import load_config, refuse_class
from mtpbuild.builder.plan.context import MAPPED, USUAL, count_weights_bytes
from mtpbuild.builder.plan.machine import THIS_MACHINE, Room
from mtpbuild.builder.plan.plan import Plan, count_state_bytes, make_state_specs
from mtpbuild.builder.plan.recipe import FoundModel, Model, name_model, suggest_instead_of
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.weights.files import collect_tensors, cut_tensors, describe_tensors
from mtpbuild.builder.weights.gguf_folder import keep_configuration, make_checkpoint
from mtpbuild.builder.weights.head import join_head, open_slice
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.runtime.errors import CheckpointError, DownloadError, explain_missing_package
from mtpbuild.runtime.files import format_size
from mtpbuild.runtime.text.tokenizer import TOKENIZER

if TYPE_CHECKING:
    from mtpbuild.builder.compiler.hub import Repository

MOST_REQUESTS = 8  # to the hub, at once
SMALL = (CONFIG, INDEX, readable.MODELOPT, readable.GPTQ)


def download(request: BuildRequest, room: Room = THIS_MACHINE) -> None:
    """Put a request's repository into huggingface_hub's cache, unless its weights are here.

    room: measures the machine's disks and memory. Fetched files stay, and the next download resumes
    there. Raises DownloadError, CheckpointError and the errors of `prepare`.
    """
    target = check_flags(request)
    model = name_model(request.model)
    if request.checkpoint is not None or model.repository is None:
        return
    found = model.find_weights(request.revision)
    if found is not None and (model.file is not None or (found / TOKENIZER).is_file()):
        return
    if model.recipe is not None and request.draft_vocab is None:
        # Nobody wants hundreds of GB on a machine that can't compile the engine.
        here = FoundModel(model.name, model.engine, model.recipe.config_folder, request.mtp)
        check_machine(request, target, here)
    with explain_missing_package("a download", "build", "huggingface_hub"):
        from mtpbuild.builder.compiler.hub import (
            UnreachableError,
            open_repository,
            silence_hub,
        )
    revision = request.revision or MAIN
    with silence_hub():
        # 1. Find the revision's commit and its files.
        try:
            repository = open_repository(model.repository, revision)
        except UnreachableError as error:
            if found is not None:  # without a tokenizer the engine takes token ids
                note = "note: %s is here without a %s, and %s"
                log = logging.getLogger(__name__)
                log.warning(note, model.repository, TOKENIZER, error.why)
                return
            raise model.missing(request.revision, (error.why, error.todo)) from None

        if model.file is not None:
            download_gguf(request, model, repository, room)
            return

        # 2. Fetch the small files, and check the build as far as they allow.
        fetch_small_files(repository)
        source = FoundModel(model.name, model.engine, repository.folder, request.mtp)
        source, config = cut_layers(request, source)
        _, plans = check_small_files(request, source, config)
        names = list_weight_files(repository)
        if wanted := sum(map(repository.count_lacking_bytes, names)):
            if request.max_seq_len is None:  # a smaller machine gets an engine of a shorter context
                plans = {out: shorten(plan) for out, plan in plans.items()}
            check_disk_and_memory(repository.name, wanted, plans, repository.folder, room)

        # 3. Check the tensors by their headers.
        drafts = any(plan.nextn for plan in plans.values())
        check_headers(repository, names, config, request, drafts)

        # 4. Fetch the weights. The revision counts as downloaded when the last one is here.
        for name in names:
            repository.fetch_weights(name)
    write_ref(model.repository, revision, repository.commit)


def download_gguf(
    request: BuildRequest, model: Model, repository: "Repository", room: Room
) -> None:
    """Fetch a GGUF file, and the file of its head, after all checks that their headers allow."""
    names, head = gguf_files(model, repository)
    with read_headers(repository, names + head) as folder:
        source = FoundModel(model.name, model.engine, folder, request.mtp)
        refuse_class(folder / CONFIG)
        source, config = cut_layers(request, source)
        _, plans = check_small_files(request, source, config)
        opened = open_slice(folder, request.layers, request.mtp)
        read = {entry.file.name for entry in opened.tensors.values()}
        names = [name for name in head if PurePosixPath(name).name in read] + names
        if wanted := sum(map(repository.count_lacking_bytes, names)):
            check_disk_and_memory(repository.name, wanted, plans, folder, room)
        opened.check(opened.settle_modules(config, any(plan.nextn for plan in plans.values())))
    for name in names:  # the trunk's file comes last, so the head's is here with it
        repository.fetch_weights(name)
    write_ref(repository.name, request.revision or MAIN, repository.commit)


def gguf_files(model: Model, repository: "Repository") -> tuple[list[str], list[str]]:
    """Return the shards of the file that a model names, and the file of a head beside it."""
    assert model.file is not None
    names = choose_model(repository.name, repository.files, model.file)
    return names, choose_head(names[0], repository.files)


@contextmanager
def read_headers(repository: "Repository", names: Sequence[str]) -> Iterator[Path]:
    """Yield a checkpoint's folder that is made of the headers of GGUF files."""
    for name in filter(is_side_file, repository.files):
        repository.fetch(name)
    with TemporaryDirectory() as temporary:
        place = Path(temporary).resolve()
        try:
            files = [place / PurePosixPath(name).name for name in names]
            for name, file in zip(names, files, strict=True):
                repository.fetch_gguf_header(name, file)
            make_checkpoint(place / "model", files, repository.folder)
            yield place / "model"
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(place), repository.name)) from None


def fetch_configuration(name: str) -> Path | None:
    """Fetch a repository's config.json alone; return its folder.

    None: `name` is a recipe's or a folder's, or the weights are here.
    """
    model = name_model(name)
    if model.recipe is not None or model.repository is None or model.find_weights() is not None:
        return None
    with explain_missing_package("a download", "build", "huggingface_hub"):
        from mtpbuild.builder.compiler.hub import (
            UnreachableError,
            open_repository,
            silence_hub,
        )
    with silence_hub():
        try:
            repository = open_repository(model.repository, MAIN)
        except UnreachableError as error:
            raise model.missing(unreached=(error.why, error.todo)) from None
        if model.file is not None:
            names, _ = gguf_files(model, repository)
            with read_headers(repository, names) as folder:
                return keep_configuration(
                    folder, f"{PurePosixPath(names[0]).stem}-{repository.commit}"
                )
        for file in (CONFIG, readable.MODELOPT):
            if file in repository.files:
                repository.fetch(file)
    return repository.folder


def fetch_small_files(repository: "Repository") -> None:
    """Fetch the files beside the weights.

    Raises CheckpointError for an unsupported class, which the first file tells, or format.
    """
    where, instead = repository.name, suggest_instead_of(repository.name, repository.made_from)
    if CONFIG in repository.files:
        repository.fetch(CONFIG)
        refuse_class(repository.folder / CONFIG)
    gguf = [name for name in repository.files if name.endswith(ENDING)]
    if gguf and not {SINGLE, INDEX} & repository.files.keys():
        raise CheckpointError(name_one(where, gguf) + instead)
    for name in repository.files:
        if name in SMALL or is_side_file(name):
            repository.fetch(name)
    load_config(repository.folder)
    if not {SINGLE, INDEX} & repository.files.keys():
        raise CheckpointError(f"{where}: neither {SINGLE} nor {INDEX}, and nothing else is read")
    readable.refuse_quantised(where, repository.folder, instead)
    readable.refuse_tokenizer(where, repository.files)


def check_headers(
    repository: "Repository",
    names: Sequence[str],
    config: ModelConfig,
    request: BuildRequest,
    drafts: bool,
) -> None:
    """Raise CheckpointError if a tensor's name, dtype or shape is wrong, as opening it would.

    names: of the weights' files, whose headers alone are fetched. drafts: whether MTP modules are
    needed.
    """
    where = Path(repository.name)
    with ThreadPoolExecutor(MOST_REQUESTS) as threads:
        headers = threads.map(repository.read_header, names)
        shards = [describe_tensors(where / n, h) for n, h in zip(names, headers, strict=True)]
    opened = collect_tensors(repository.folder, shards)
    if request.mtp is not None:
        opened = join_head(opened, request.mtp, load_config(repository.folder))
    named = replace(cut_tensors(opened, request.layers), folder=where)
    named.check(named.settle_modules(config, drafts))


def list_weight_files(repository: "Repository") -> list[str]:
    """Return the names of the safetensors files that hold the model."""
    names = read_shard_names(repository.folder)
    if missing := [name for name in names if name not in repository.files]:
        raise CheckpointError(f"{repository.name}: {INDEX} names {missing[0]}, which is not there")
    return names


def check_disk_and_memory(
    name: str, wanted: int, plans: Mapping[Path, Plan], folder: Path, room: Room
) -> None:
    """Raise DownloadError if download, engine or the engine's run need more room than there is.

    wanted: bytes to be fetched. folder: has the checkpoint's small files. Engines of one build
    share their weights, so these count once; weights inside programs don't count. Of several ranks
    only one counts: the others may be built and run on other machines.
    """
    downloads, plan = room.disk(cache_folder()), next(iter(plans.values()))
    if wanted > downloads.free:
        raise DownloadError(
            f"{name}: {format_size(wanted)} are to be fetched, and the disk of {cache_folder()} "
            f"has {format_size(downloads.free)} free; HF_HUB_CACHE names another folder"
        )
    place = next(iter(plans)).parent
    engines, memory = room.disk(place), room.memory()
    free = engines.free - (wanted if engines.device == downloads.device else 0)
    engine = count_weights_bytes(plan, folder)
    if engine > free:
        raise DownloadError(
            f"{name}: the engine takes {format_size(engine)}, and beside the download the disk of "
            f"{place.resolve()} has {format_size(free)} free{smaller(plan, folder)}; --out "
            "names another place"
        )
    states = (sum(map(count_state_bytes, make_state_specs(each))) for each in plans.values())
    needed = round(MAPPED * engine) + max(states)
    if memory is not None and not plan.style.for_gpu and needed > memory:
        raise DownloadError(
            f"{name}: the engine needs {format_size(needed)} of memory, and this machine has "
            f"{format_size(memory)}{smaller(plan, folder)}; to build it for another machine, "
            f"fetch the checkpoint by `hf download {name}`"
        )


def shorten(plan: Plan) -> Plan:
    """Return the plan with the shortest context that a build chooses."""
    return replace(plan, max_seq_len=min(plan.max_seq_len, USUAL))


def smaller(plan: Plan, folder: Path) -> str:
    """Return a hint at the target's smallest format, or "" if the engine would not get smaller."""
    sizes = {
        name: count_weights_bytes(replace(plan, scheme=build_scheme(name)), folder)
        for name in plan.style.formats
    }
    if not sizes or min(sizes.values()) >= count_weights_bytes(plan, folder):
        return ""
    best = min(sizes, key=lambda name: sizes[name])
    return f"; --weights {best} makes one of {format_size(sizes[best])}"
