"""A folder for a GGUF file, with the files that Hugging Face's checkpoints have.

The folder is in a cache, and links to the GGUF files. Files that lie beside a GGUF file, such as
tokenizer.json, win over those made from its keys.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mtpbuild.builder.checkpoint.hub_cache import find_snapshot
from mtpbuild.builder.checkpoint.shards import INDEX, SINGLE
from mtpbuild.builder.checkpoint.side_files import CONFIG, side_files
from mtpbuild.builder.gguf.choice import (
    ENDING,
    HEAD,
    HEADS,
    PROJECTOR,
    choose_head,
    choose_model,
    name_link,
)
from mtpbuild.builder.gguf.container import (
    SHARD,
    GgufFile,
    find_own_path,
    find_shard_paths,
    read_file,
)
from mtpbuild.builder.gguf.mapped import GgufWeight
from mtpbuild.builder.gguf.tensors import Architecture, list_weights
from mtpbuild.builder.gguf.tokenizer import WordSplit, explain_unknown_split, tokenizer_files
from mtpbuild.builder.models import Family, families
from mtpbuild.builder.models.heads import list_gguf_heads
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.files import find_user_cache
from mtpbuild.runtime.text.tokenizer import TOKENIZER

logger = logging.getLogger(__name__)


def holds_gguf(folder: Path) -> bool:
    """Return whether a folder's weights are GGUF files, with no safetensors beside them."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return not {SINGLE, INDEX} & {*names} and any(name.endswith(ENDING) for name in names)


def find_trunk(folder: Path) -> Path:
    """Return the one GGUF file of a folder, or its first shard; raise CheckpointError."""
    paths = sorted(folder.glob(f"*{ENDING}"))
    models = [p for p in paths if not p.name.startswith((HEAD, PROJECTOR))]
    first = [p for p in models if not (m := SHARD.fullmatch(p.name)) or int(m[2]) == 1]
    if len(first) == 1:
        return first[0]
    if not first:
        raise CheckpointError(f"{folder}: no GGUF file of a whole model, only {paths[0].name}")
    names = ", ".join(path.name for path in first)
    raise CheckpointError(f"{folder} holds several models; name one of its files: {names}")


def find_head(trunk: Path) -> Path | None:
    """Return the file beside a GGUF file that holds its head alone, if there is one."""
    here = trunk.parent
    paths = [path for name in (f"{HEAD}*", f"{HEADS}/*") for path in here.glob(name + ENDING)]
    heads = choose_head(trunk.name, [path.relative_to(here).as_posix() for path in paths])
    return here / heads[0] if heads else None


def find_lone_head(folder: Path) -> Path | None:
    """Return the file beside a folder's GGUF file whose head is no modules of the trunk, if any."""
    if not holds_gguf(folder) or (path := find_head(find_trunk(folder))) is None:
        return None
    return find_own_path(path) if read_file(path).architecture in list_gguf_heads() else None


def find_cached_gguf(repository: str, tag: str, revision: str | None = None) -> Path | None:
    """Return the path of a downloaded file that `tag` names; None if parts of it are missing."""
    snapshot = find_snapshot(repository, revision)
    if snapshot is None or not snapshot.is_dir():
        return None
    here = (path for path in snapshot.rglob(f"*{ENDING}") if path.is_file())
    try:
        names = choose_model(repository, [str(p.relative_to(snapshot)) for p in here], tag)
        return find_shard_paths(snapshot / names[0])[0]
    except CheckpointError:
        return None


def read_model(folder: Path) -> GgufFile:
    """Read a folder's GGUF file, joined with its head's if the head is in a file of its own."""
    path = find_trunk(folder)
    trunk = read_file(path)
    if any("nextn." in name for name in trunk.tensors) or (place := find_head(path)) is None:
        return trunk
    if (head := read_file(place)).architecture in list_gguf_heads():
        return trunk
    refuse_other(trunk, head)
    blocks = (f"blk.{head.layers + j}." for j in range(head.modules))
    prefixes = tuple(blocks)
    joined = {name: tensor for name, tensor in head.tensors.items() if name.startswith(prefixes)}
    if prefixes and (start := find_architecture(trunk)[1].module_tops):
        tops = (name for name in head.tensors if name.startswith(start))
        joined |= {f"{prefixes[0]}{name}": head.tensors[name] for name in tops}
    count = {f"{trunk.architecture}.nextn_predict_layers": head.modules}
    count[f"{trunk.architecture}.block_count"] = head.layers + head.modules
    return replace(trunk, keys={**trunk.keys, **count}, tensors={**trunk.tensors, **joined})


def refuse_other(trunk: GgufFile, head: GgufFile) -> None:
    """Raise CheckpointError if a head was made for another model."""

    def sizes(file: GgufFile) -> dict[str, object]:
        embedding = file.tensors.get("token_embd.weight")
        tokens = embedding.shape[0] if embedding is not None else None
        return {
            "architecture": file.architecture,
            "embedding_length": file.key("embedding_length"),
            "layers": file.layers,
            "tokens": tokens,
        }

    theirs = sizes(head)
    for what, ours in sizes(trunk).items():
        if theirs[what] is not None and theirs[what] != ours:
            raise CheckpointError(
                f"{head.path}: an MTP head of another model: {what} {theirs[what]}, not {ours} as "
                f"in {trunk.path.name}; move it away, and build with --nextn 0"
            )


def find_checkpoint_folder(path: Path) -> Path:
    """Return a folder in which a GGUF file is a checkpoint; any other folder is returned as it is.

    path: the file, one of its shards, or a folder with one.
    """
    if path.is_dir():
        if not holds_gguf(path):
            return path
        path = find_trunk(path)
    elif path.suffix != ENDING or not path.is_file():
        return path  # reading it tells what is wrong
    path = find_own_path(find_shard_paths(path)[0])
    links = {shard.name: shard for shard in find_shard_paths(path)}
    if (head := find_head(path)) is not None:
        links |= {name_link(str(shard)): shard for shard in find_shard_paths(head)}
    folder = _cache() / f"{path.stem}-{_hash([*links.values()])}"
    kept = folder.is_dir()
    try:
        make_checkpoint(folder, links, path.parent)
    except CheckpointError:
        if not kept:  # nothing stays of a file that is refused
            shutil.rmtree(folder, ignore_errors=True)
        raise
    why = explain_unknown_split(read_model(folder), list_splits())
    if why is not None and not (path.parent / TOKENIZER).is_file():
        note = "note: %s: %s: the engine takes token ids; put a %s beside it"
        logger.warning(note, path.name, why, TOKENIZER)
    return folder


def make_checkpoint(folder: Path, links: Mapping[str, Path], beside: Path) -> None:
    """Make a folder in which GGUF files are a checkpoint; beside: a folder with other files.

    links: the files by their names in the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, source in links.items():
            link = folder / name
            if not link.exists():
                link.unlink(missing_ok=True)
                link.symlink_to(source)
        file = read_model(folder)
        family, architecture = find_architecture(file)
        config = {"model_type": family.model_type, **architecture.config(file)}
        texts = {CONFIG: json.dumps(config, indent=2)}
        texts |= tokenizer_files(file, beside, list_splits())
        for name, text in texts.items():
            partial = folder / f"{name}.{os.getpid()}"
            partial.write_text(text, encoding="utf-8")
            partial.replace(folder / name)
        for name in side_files(beside):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(beside / name, folder / name)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: can't be written ({error.strerror})") from None


def keep_configuration(folder: Path, name: str) -> Path:
    """Copy a checkpoint's config.json into a folder of the cache, and return that."""
    kept = _cache() / name
    try:
        kept.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / CONFIG, kept / CONFIG)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: can't be written ({error.strerror})") from None
    return kept


def find_architecture(file: GgufFile) -> tuple[Family, Architecture]:
    """Return the family that reads a file; raise CheckpointError, which lists what is read."""
    known = [(family, each) for family in families() for each in family.gguf()]
    fitting = [
        (family, architecture)
        for family, architecture in known
        if architecture.name == file.architecture
        and file.tokenizer.startswith(architecture.tokenizer)
    ]
    if not fitting:
        names = ", ".join(dict.fromkeys(architecture.name for _, architecture in known))
        raise CheckpointError(
            f"{file.path}: architecture {file.architecture} is not read; supported: {names}"
        )
    return max(fitting, key=lambda pair: len(pair[1].tokenizer))


def list_splits() -> dict[str, WordSplit]:
    """Return how texts are split into words, by the name that files have for it."""
    architectures = (each for family in families() for each in family.gguf())
    return {name: split for each in architectures for name, split in each.splits.items()}


def list_gguf_weights(folder: Path) -> list[GgufWeight]:
    """Return the weights of a folder's GGUF files under the checkpoint's names."""
    file = read_model(folder)
    return [*list_weights(file, find_architecture(file)[1])]


def _cache() -> Path:
    return find_user_cache() / "gguf"


def _hash(paths: list[Path]) -> str:
    """Hash the places, sizes and times of files, so that each version has its own folder."""
    stats = [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in paths]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:12]
