"""Choose a GGUF file by the format that its name ends with, as in `OWNER/NAME:Q4_K_M`."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from mtpbuild.builder.gguf.container import SHARD
from mtpbuild.runtime.errors import CheckpointError

ENDING, HEAD, PROJECTOR = ".gguf", "mtp-", "mmproj"
HEADS = "MTP"  # a folder with heads beside a trunk


def list_models(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the GGUF files of whole models, by path without ending, each with all its shards."""
    shards = dict[str, list[str]]()
    for name in sorted(names):
        path = PurePosixPath(name)
        whole = path.parent.name != HEADS and not path.name.startswith((HEAD, PROJECTOR))
        if path.suffix == ENDING and whole:
            match = SHARD.fullmatch(path.name)
            stem = path.with_name(match[1]) if match else path.with_suffix("")
            shards.setdefault(str(stem), []).append(name)
    return shards


def choose_model(where: str, names: Iterable[str], tag: str) -> list[str]:
    """Return the shards of the file that is named so, or whose name ends so.

    Capitals do not count. Raises CheckpointError, which lists the files, if there is not just one.
    """
    models, typed = list_models(names), tag.lower().removesuffix(ENDING)
    files = {stem: PurePosixPath(stem).name.lower() for stem in models}
    ends = re.compile(rf"(.*[-._])?{re.escape(typed)}")
    chosen = [stem for stem, file in files.items() if file == typed]
    chosen = chosen or [stem for stem, file in files.items() if ends.fullmatch(file)]
    if len(chosen) == 1:
        return models[chosen[0]]
    there = ", ".join(map(str, chosen or models)) or "none"
    what = f"several GGUF files are named {tag}" if chosen else f"no GGUF file is named {tag}"
    raise CheckpointError(f"{where}: {what}; there are: {there}")


def choose_head(trunk: str, names: Iterable[str]) -> list[str]:
    """Return the shards of the file that holds a trunk's head alone, if any.

    It lies beside the trunk's, or in a folder there.
    """
    path, names = PurePosixPath(trunk), [*names]
    heads = [
        name
        for name in sorted(names)
        if (file := PurePosixPath(name)).suffix == ENDING
        and (
            file.parent == path.parent / HEADS
            or (file.parent == path.parent and file.name.startswith(HEAD))
        )
    ]
    named = str(path.with_name(HEAD + path.name))
    return [named] if named in names else heads if len(heads) == 1 else []


def name_link(name: str) -> str:
    """Return what a file is called in a checkpoint's folder; a head's name begins as one's."""
    path = PurePosixPath(name)
    marked = path.parent.name != HEADS or path.name.startswith(HEAD)
    return path.name if marked else HEAD + path.name


def name_one(where: str, names: Sequence[str]) -> str:
    """Return the message about a repository that has GGUF files alone."""
    models = [*list_models(names)]
    kind = re.split(r"[-.]", PurePosixPath(models[0]).name)[-1] if models else "Q4_K_M"
    return (
        f"{where} has only GGUF files: name one, as --model {where}:{kind}; there are: "
        f"{', '.join(models) or ', '.join(names)}"
    )


def explain_joining(path: Path) -> str:
    """Return how a GGUF file gets an MTP head, as the end of a message; "" for other paths."""
    return f", or put its head beside it as {HEAD}{path.name}" if path.suffix == ENDING else ""
