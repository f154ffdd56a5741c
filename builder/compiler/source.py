"""The model that a build reads: found here or at the hub, checked by its small files, fetched."""

import logging
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from mtpbuild.builder.checkpoint import readable
from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.builder.checkpoint.generation import GenerationIds, read_generation_ids
from mtpbuild.builder.checkpoint.hub_cache import (
    MAIN,
    cache_folder,
    find_cached_snapshot,
    write_ref,
)
from mtpbuild.builder.checkpoint.shards import INDEX, SINGLE, read_shard_names
from mtpbuild.builder.checkpoint.side_files import CONFIG, is_side_file, side_files
from mtpbuild.builder.gguf.choice import ENDING, choose_head, choose_model, name_link, name_one
from mtpbuild.builder.models import find_family_of, load_config, read_renames, refuse_class
from mtpbuild.builder.plan.context import MAPPED, USUAL, count_weights_bytes
from mtpbuild.builder.plan.machine import Room
from mtpbuild.builder.plan.plan import Plan, count_state_bytes, make_state_specs
from mtpbuild.builder.plan.recipe import (
    REPOSITORY,
    FoundModel,
    Model,
    find_model,
    find_shipped_template,
    name_model,
    suggest_instead_of,
)
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.weights.checkpoint import Checkpoint
from mtpbuild.builder.weights.files import collect_tensors, cut_tensors, describe_tensors
from mtpbuild.builder.weights.gguf_folder import (
    find_checkpoint_folder,
    find_lone_head,
    keep_configuration,
    make_checkpoint,
)
from mtpbuild.builder.weights.head import join_head, open_slice, read_head_config
from mtpbuild.builder.weights.scheme import SCHEMES, build_scheme
from mtpbuild.runtime.errors import (
    CheckpointError,
    DownloadError,
    EngineFileError,
    MissingWeightsError,
    UsageError,
    explain_missing_package,
)
from mtpbuild.runtime.files import format_size
from mtpbuild.runtime.text.tokenizer import TOKENIZER, read_tokenizer

if TYPE_CHECKING:
    from mtpbuild.builder.compiler.hub import Repository

logger = logging.getLogger(__name__)

MAX_REQUESTS = 8  # to the hub, at once
SMALL = (CONFIG, INDEX, readable.MODELOPT, readable.GPTQ)


@dataclass(frozen=True)
class RemoteWeights:
    """Files of a repository that hold a model's weights.

    head: GGUF files that are fetched if MTP modules are read from them.
    """

    repository: "Repository"
    revision: str
    names: Sequence[str]
    head: Sequence[str] = ()
    gguf: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelSource(FoundModel):
    """The model to build, or the requested layers of it; its small files are read and checked.

    remote: its weights, if they are not here yet.
    """

    config: ModelConfig
    ids: GenerationIds
    remote: RemoteWeights | None = None

    def fetch(self, request: BuildRequest, plans: Mapping[Path, Plan], room: Room) -> "ModelSource":
        """Fetch the weights, which are not here; return the model with their folder.

        Before the weights come all checks that their headers allow. room: measures the machine's
        disks and memory. Fetched files stay, and the next build of the model goes on from there.
        Raises DownloadError or CheckpointError.
        """
        assert self.remote is not None
        repository, names = self.remote.repository, [*self.remote.head, *self.remote.names]
        if wanted := sum(map(repository.count_lacking_bytes, names)):
            check_disk_and_memory(self, request, wanted, plans, room)
        drafts = any(plan.nextn for plan in plans.values())
        with call_folder(self.folder, repository.name):
            opened = open_headers(self, self.remote, request)
            opened.check(opened.settle_modules(self.config, drafts))
        read = {entry.file.name for entry in opened.tensors.values()}
        # Of GGUF files the head's comes first: the trunk's says that all is here.
        for name in names:
            if name in self.remote.names or name_link(name) in read:
                repository.fetch_weights(name)
        write_ref(repository.name, self.remote.revision, repository.commit)
        here = name_model(request.model).find_weights(request.revision)
        assert here is not None
        folder = find_checkpoint_folder(here)
        return replace(self, folder=folder, mtp=find_mtp(request, folder), remote=None)


def find_source(request: BuildRequest, *, may_fetch: bool = False) -> ModelSource:
    """Find a request's model and check its small files.

    may_fetch: whether the hub is asked for what is not here; only small files are fetched. Raises
    UsageError, CheckpointError, MissingWeightsError or DownloadError.
    """
    request = replace(request, mtp=find_head_place(request, may_fetch=may_fetch))
    if may_fetch and (remote := find_remote_model(request)) is not None:
        with call_folder(remote[0].folder, remote[1].repository.name):
            return read_source(request, *remote)
    model = find_model(request.model, request.checkpoint, request.revision)
    return read_source(request, replace(model, mtp=find_mtp(request, model.folder)))


def find_mtp(request: BuildRequest, folder: Path) -> Path | None:
    """Return where a request's MTP head lies apart: where --mtp says, else beside a GGUF file."""
    if request.mtp is not None or request.layers is not None or request.nextn == (0,):
        return request.mtp
    return find_lone_head(folder)


def find_head_place(request: BuildRequest, *, may_fetch: bool) -> Path | None:
    """Return the file or folder of the head that --mtp or a recipe names; None: there is none.

    may_fetch: whether a repository's files are fetched if they are not here.
    """
    place = request.mtp
    if place is not None and (place.exists() or REPOSITORY.fullmatch(str(place)) is None):
        return place
    recipe = None if request.nextn == (0,) else name_model(request.model).recipe
    if place is None and recipe is not None and recipe.head_folder is not None:
        return recipe.head_folder
    name = str(place) if place else recipe.head if recipe else None
    if name is None:
        return None
    if (here := find_cached_snapshot(name)) is not None:
        return here
    model = Model(name, name, repository=name)
    if not may_fetch or (repository := ask_hub(model)) is None:
        raise MissingWeightsError(
            f"{request.model} drafts by {name}, which is not downloaded here: `hf download {name}` "
            "fetches it, --mtp names a folder that has it, and --nextn 0 builds without"
        )
    for file in repository.files:
        if file in SMALL:
            repository.fetch(file)
    for file in list_weight_files(repository):
        repository.fetch_weights(file)
    write_ref(name, MAIN, repository.commit)
    return repository.folder


def read_source(
    request: BuildRequest, model: FoundModel, remote: RemoteWeights | None = None
) -> ModelSource:
    """Read and check a model's small files; --layers cuts the model and is added to its name."""
    config, folder, layers = load_config(model.folder), model.folder, request.layers
    if model.mtp is not None:
        config = read_head_config(model.mtp, folder, config)
    names = {"name": model.name, "engine": model.engine}
    if layers is not None:
        if config.head:
            raise UsageError(
                f"--layers {layers}: {config.head.title} reads layers of the whole model"
            )
        config = layers.of(config)
        names = {field: f"{name}-layers{layers}" for field, name in names.items()}
    ids = read_generation_ids(folder, config)
    readable.refuse_tokenizer(str(folder), [path.name for path in folder.iterdir()])
    try:
        template = request.chat_template
        tokenizer = read_tokenizer(folder, side_files(folder), ids, template)
        if tokenizer is not None and tokenizer.chat_template is not None:
            tokenizer.chat_template.check()
        elif tokenizer is not None:
            template = find_shipped_template(find_family_of(config).model_type)
    except EngineFileError as error:
        why = str(error).removeprefix(f"{folder}/")
        raise CheckpointError(f"{folder}/{why}") from None
    return ModelSource(
        **names,
        folder=folder,
        mtp=model.mtp,
        config=config,
        ids=ids,
        remote=remote,
        chat_template=template,
    )


def find_remote_model(request: BuildRequest) -> tuple[FoundModel, RemoteWeights] | None:
    """Fetch the small files of a repository whose weights are not here, or whose tokenizer is not.

    None: the model is here, or in no repository.
    """
    model = name_model(request.model)
    if request.checkpoint is not None or model.repository is None:
        return None
    here = model.find_weights(request.revision)
    if here is not None and (model.file is not None or (here / TOKENIZER).is_file()):
        return None
    repository = ask_hub(model, request.revision, is_here=here is not None)
    if repository is None:
        return None
    revision = request.revision or MAIN
    if model.file is not None:
        names, head = choose_gguf_files(model, repository)
        folder = make_folder_of_headers(repository, names + head)
        refuse_class(folder / CONFIG)
        remote = RemoteWeights(repository, revision, names, head, gguf=True)
    else:
        fetch_small_files(repository)
        folder = repository.folder
        remote = RemoteWeights(repository, revision, list_weight_files(repository))
    return FoundModel(model.name, model.engine, folder, find_mtp(request, folder)), remote


def ask_hub(
    model: Model, revision: str | None = None, *, is_here: bool = False
) -> "Repository | None":
    """Ask the hub for a model's repository; raise DownloadError.

    If the hub can't be reached, return None for a model that `is_here` except for its tokenizer:
    the engine then takes token ids. For others raise MissingWeightsError.
    """
    assert model.repository is not None
    with explain_missing_package("a download", "build", "huggingface_hub"):
        from mtpbuild.builder.compiler.hub import UnreachableError, open_repository
    try:
        return open_repository(model.repository, revision or MAIN)
    except UnreachableError as error:
        if not is_here:
            raise model.missing(revision, (error.why, error.todo)) from None
        note = "note: %s is here without a %s, and %s"
        logger.warning(note, model.repository, TOKENIZER, error.why)
        return None


def fetch_configuration(name: str) -> Path | None:
    """Fetch a repository's config.json alone; return its folder.

    None: `name` is a recipe's or a folder's, or the weights are here.
    """
    model = name_model(name)
    if model.recipe is not None or model.repository is None or model.find_weights() is not None:
        return None
    repository = ask_hub(model)
    assert repository is not None
    if model.file is not None:
        names, _ = choose_gguf_files(model, repository)
        folder = make_folder_of_headers(repository, names)
        return keep_configuration(folder, f"{PurePosixPath(names[0]).stem}-{repository.commit}")
    for file in (CONFIG, readable.MODELOPT):
        if file in repository.files:
            repository.fetch(file)
    return repository.folder


def choose_gguf_files(model: Model, repository: "Repository") -> tuple[list[str], list[str]]:
    """Return the shards of the file that a model names, and the file of a head beside it."""
    assert model.file is not None
    names = choose_model(repository.name, repository.files, model.file)
    return names, choose_head(names[0], repository.files)


def make_folder_of_headers(repository: "Repository", names: Sequence[str]) -> Path:
    """Make a checkpoint's folder of the headers of GGUF files; it lives as long as `repository`."""
    for name in filter(is_side_file, repository.files):
        repository.fetch(name)
    place = Path(mkdtemp()).resolve()
    weakref.finalize(repository, shutil.rmtree, place, ignore_errors=True)
    folder = place / "model"
    with call_folder(folder, repository.name):
        links = {name: place / name for name in map(name_link, names)}
        for name, file in zip(names, links.values(), strict=True):
            repository.fetch_gguf_header(name, file)
        make_checkpoint(folder, links, repository.folder)
    return folder


@contextmanager
def call_folder(folder: Path, name: str) -> Iterator[None]:
    """Let a CheckpointError of the block speak of a repository in place of its temporary folder."""
    try:
        yield
    except CheckpointError as error:
        text = str(error).replace(str(folder), name)
        raise CheckpointError(text.replace(str(folder.parent), name)) from None


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


def list_weight_files(repository: "Repository") -> list[str]:
    """Return the names of the safetensors files that hold the model."""
    names = read_shard_names(repository.folder)
    if missing := [name for name in names if name not in repository.files]:
        raise CheckpointError(f"{repository.name}: {INDEX} names {missing[0]}, which is not there")
    return names


def open_headers(source: ModelSource, remote: RemoteWeights, request: BuildRequest) -> Checkpoint:
    """List a repository's tensors by the headers of its files, which alone are fetched."""
    if remote.gguf:
        return open_slice(source.folder, request.layers, source.mtp)
    where = Path(remote.repository.name)
    with ThreadPoolExecutor(MAX_REQUESTS) as threads:
        headers = threads.map(remote.repository.read_header, remote.names)
        places = [where / name for name in remote.names]
        shards = [*map(describe_tensors, places, headers)]
    opened = collect_tensors(source.folder, shards, read_renames(source.folder))
    if source.mtp is not None:
        opened = join_head(opened, source.mtp, load_config(source.folder))
    return replace(cut_tensors(opened, request.layers), folder=where)


def check_disk_and_memory(
    source: ModelSource, request: BuildRequest, wanted: int, plans: Mapping[Path, Plan], room: Room
) -> None:
    """Raise DownloadError if download, engine or the engine's run need more room than there is.

    wanted: bytes to be fetched. Engines of one build share their weights, so these count once;
    weights inside programs don't count. Of several ranks only one counts: the others may be built
    and run on other machines.
    """
    assert source.remote is not None
    name, downloads = source.remote.repository.name, room.disk(cache_folder())
    if wanted > downloads.free:
        raise DownloadError(
            f"{name}: {format_size(wanted)} are to be fetched, and the disk of {cache_folder()} "
            f"has {format_size(downloads.free)} free; HF_HUB_CACHE names another folder"
        )
    place, plan = next(iter(plans.items()))
    engines, memory = room.disk(place.parent), room.memory()
    free = engines.free - (wanted if engines.device == downloads.device else 0)
    engine = count_weights_bytes(plan, source.folder)
    if engine > free:
        raise DownloadError(
            f"{name}: the engine takes {format_size(engine)}, and beside the download the disk of "
            f"{place.parent.resolve()} has {format_size(free)} free"
            f"{suggest_format(plan, source.folder)}; --out names another place"
        )
    # Without --max-seq-len a smaller machine gets an engine of a shorter context.
    longest = USUAL if request.max_seq_len is None else plan.max_seq_len
    shortened = (replace(p, max_seq_len=min(p.max_seq_len, longest)) for p in plans.values())
    states = (sum(map(count_state_bytes, make_state_specs(p))) for p in shortened)
    needed = round(MAPPED * engine) + max(states)
    if memory is not None and not plan.style.for_gpu and needed > memory:
        raise DownloadError(
            f"{name}: the engine needs {format_size(needed)} of memory, and this machine has "
            f"{format_size(memory)}{suggest_format(plan, source.folder)}; to build it for another "
            f"machine, fetch the checkpoint by `hf download {name}`"
        )


def suggest_format(plan: Plan, folder: Path) -> str:
    """Suggest the target's smallest format: "; --weights int4 makes one of 6.53 GB".

    "" if the engine would not get smaller. folder: has the checkpoint's small files.
    """
    sizes = {
        name: count_weights_bytes(replace(plan, scheme=build_scheme(name)), folder)
        for name in plan.style.formats
        if name in SCHEMES
    }
    if not sizes or min(sizes.values()) >= count_weights_bytes(plan, folder):
        return ""
    best = min(sizes, key=lambda name: sizes[name])
    return f"; --weights {best} makes one of {format_size(sizes[best])}"
