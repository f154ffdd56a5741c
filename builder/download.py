"""Brings here what a build reads of a Hugging Face repository, checked before any weights come."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.builder.checkpoint.hub_cache import MAIN, write_ref
from mtpbuild.builder.checkpoint.readable import (
    MODELOPT,
    refuse_gguf,
    refuse_quantised,
    refuse_tokenizer,
)
from mtpbuild.builder.checkpoint.shards import INDEX, SINGLE, shard_names
from mtpbuild.builder.checkpoint.side_files import CONFIG, SIDE_FILES
from mtpbuild.builder.checks import needs
from mtpbuild.builder.host import free_bytes
from mtpbuild.builder.models import load_config
from mtpbuild.builder.prepare import check_flags, check_without_weights
from mtpbuild.builder.recipe import Source, instead_of, name_model
from mtpbuild.builder.request import BuildRequest
from mtpbuild.runtime.errors import CheckpointError, DownloadError, MissingWeightsError

if TYPE_CHECKING:
    from mtpbuild.builder.hub import Repository

SMALL = (CONFIG, *SIDE_FILES, INDEX, MODELOPT)


def download(request: BuildRequest, free: Callable[[Path], int] = free_bytes) -> None:
    """Put a request's repository into huggingface_hub's cache, unless its weights are here.

    Raises DownloadError or CheckpointError with what is wrong, and what `prepare` would raise.
    What has been fetched stays, and the next download goes on from there.
    """
    check_flags(request)
    model = name_model(request.model)
    if request.checkpoint is not None or model.repository is None:
        return
    if model.find_weights(request.revision) is not None:
        return
    with needs("build", "huggingface_hub"):
        from mtpbuild.builder.hub import OfflineError, UnreachableError, open_repository, quiet
    revision = request.revision or MAIN
    with quiet():
        # 1. Which commit the revision is, and which files it has.
        try:
            repository = open_repository(model.repository, revision)
        except (OfflineError, UnreachableError) as error:
            raise MissingWeightsError(f"{model.missing(request.revision)}; {error}") from None

        # 2. The small files, and all that can be said by them.
        fetch_small_files(repository)
        check_without_weights(request, Source(model.name, model.engine, repository.folder))

        # 3. The weights; only with the last of them is the revision here.
        names = find_weights(repository)
        check_room(repository, names, free)
        for name in names:
            repository.fetch_weights(name)
    write_ref(model.repository, revision, repository.commit)


def fetch_small_files(repository: "Repository") -> None:
    """Fetch what lies beside the weights; raises CheckpointError for a format that is not read."""
    where, instead = repository.name, instead_of(repository.name, repository.made_from)
    refuse_gguf(where, repository.files, instead)
    for name in SMALL:
        if name in repository.files:
            repository.fetch(name)
    load_config(repository.folder)
    if not {SINGLE, INDEX} & repository.files.keys():
        raise CheckpointError(f"{where}: neither {SINGLE} nor {INDEX}, and nothing else is read")
    refuse_quantised(where, repository.folder, instead)
    refuse_tokenizer(where, repository.files)


def find_weights(repository: "Repository") -> list[str]:
    """The safetensors files that hold the model."""
    names = shard_names(repository.folder)
    if missing := [name for name in names if name not in repository.files]:
        raise CheckpointError(f"{repository.name}: {INDEX} names {missing[0]}, which is not there")
    return names


def check_room(repository: "Repository", names: list[str], free: Callable[[Path], int]) -> None:
    """Refuse to begin with weights for which the cache's disk has no room."""
    wanted, there = sum(map(repository.lacking_bytes, names)), free(repository.cache)
    if wanted > there:
        raise DownloadError(
            f"{repository.name}: {wanted / 1e9:.1f} GB are to be fetched, and the disk of "
            f"{repository.cache} has {there / 1e9:.1f} GB free; HF_HUB_CACHE names another folder"
        )
