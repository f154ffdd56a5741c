"""Join MTP modules from other files to a checkpoint: its own are missing, or are replaced."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open

from mtpbuild.builder.checkpoint.config import HEAD as HEAD_PREFIX
from mtpbuild.builder.checkpoint.config import HeadConfig
from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.checkpoint.readable import read_object, read_text_config, refuse_quantised
from mtpbuild.builder.checkpoint.shards import find_shards, has_weights
from mtpbuild.builder.checkpoint.side_files import CONFIG
from mtpbuild.builder.gguf.choice import ENDING, HEAD
from mtpbuild.builder.gguf.container import DRAFT_IDS, GgufFile, find_shard_paths, read_file
from mtpbuild.builder.gguf.tensors import Architecture, list_weights
from mtpbuild.builder.lazy_torch import Tensor, torch
from mtpbuild.builder.models import ModelConfig, find_family_of, load_config
from mtpbuild.builder.models.common.copies import EMBEDDING
from mtpbuild.builder.models.heads import Head, find_head, join_config, list_gguf_heads
from mtpbuild.builder.models.modules import (
    PREFIXES,
    count_stored_modules,
    is_module,
    name_lone_tensor,
    name_modules,
)
from mtpbuild.builder.weights.checkpoint import Checkpoint, FileEntry
from mtpbuild.builder.weights.files import (
    collect_tensors,
    cut_tensors,
    describe_gguf,
    list_entries,
    open_checkpoint,
)
from mtpbuild.builder.weights.gguf_folder import find_trunk, holds_gguf
from mtpbuild.runtime.errors import CheckpointError

EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight")
TRUNK, HASH = "trunk", "embedding_hash"  # in the config.json of a head that tune-head made
HASH_BITS = 256


def find_head_files(place: Path) -> list[Path]:
    """Return the files that --mtp names: one, a checkpoint's, or all of a folder's."""
    if place.is_file():
        return find_shard_paths(place)
    if not place.is_dir():
        raise CheckpointError(f"--mtp {place}: no such file or folder")
    if has_weights(place):
        return find_shards(place)
    if files := sorted(place.glob("*.safetensors")):
        return files
    if holds_gguf(place):
        return find_shard_paths(find_trunk(place))
    raise CheckpointError(f"--mtp {place}: no safetensors file is in this folder")


def read_gguf_head(place: Path) -> tuple[GgufFile, Architecture] | None:
    """Read a head in a GGUF file; return None if the place has safetensors files.

    Its layers may count as MTP modules in its keys, though there is no trunk before them.
    """
    path = find_head_files(place)[0]
    if path.suffix != ENDING:
        return None
    file, known = read_file(path), list_gguf_heads()
    if file.architecture not in known:
        raise CheckpointError(
            f"--mtp {place}: architecture {file.architecture}: only {', '.join(known)} are read "
            f"here; an MTP head of a GGUF trunk lies beside it as {HEAD}NAME.gguf"
        )
    keys = {**file.keys, f"{file.architecture}.nextn_predict_layers": 0}
    return replace(file, keys=keys), known[file.architecture]


def read_head_file(place: Path) -> dict[str, Any]:
    """Return the config.json beside a head, or what its GGUF file says instead; {} if neither."""
    if (head := read_gguf_head(place)) is not None:
        file, architecture = head
        return architecture.config(file)
    return read_object(find_head_files(place)[0].parent / CONFIG) or {}


def open_head(place: Path, config: ModelConfig) -> Checkpoint:
    """List the tensors of MTP modules in a file or a folder, by their names in the model.

    Their number formats are their own: the settings are those of a config.json beside them. Raises
    CheckpointError if there are none, or if they are another model's.
    """
    head = find_head(read_head_file(place))
    if head is not None and (stored_head := read_gguf_head(place)) is not None:
        return rename_head(head, describe_gguf(stored_head[0].path, list_weights(*stored_head)))
    files, family = find_head_files(place), find_family_of(config)
    folder = files[0].parent
    refuse_quantised(f"--mtp {place}", folder)
    stored = [entry for file in files for entry in list_entries(file)]
    if head is not None:
        named = rename_head(head, collect_tensors(folder, [stored]))
        if not named.tensors:
            raise CheckpointError(f"--mtp {place}: no tensor of {head.config.title} is there")
        return named
    refuse_other_model(place, folder, stored, config)
    opened = collect_tensors(folder, [stored], family.renames)
    if config.head:
        raise CheckpointError(
            f"--mtp {place}: MTP modules can't replace {config.head.title}, which the model has: "
            "leave --mtp out"
        )
    names = name_modules(config, opened.tensors)
    tensors = {names[name]: entry for name, entry in opened.tensors.items() if name in names}
    alone = (f"{prefix}{config.module_names.input_proj}.weight" for prefix in PREFIXES)
    if not tensors and any(name in opened.tensors for name in alone):
        tensors = {name_lone_tensor(config, n): entry for n, entry in opened.tensors.items()}
    if not count_stored_modules(family, config, tensors):
        first = config.name_module(0)
        raise CheckpointError(f"--mtp {place}: no tensor of MTP layer {first} is there")
    return replace(opened, tensors=tensors, tower=0)


def rename_head(kind: Head, head: Checkpoint) -> Checkpoint:
    """Return a head's weights under their names in the model, without what is no weight."""
    named = {kind.rename(name): entry for name, entry in head.tensors.items()}
    tensors = {name: entry for name, entry in named.items() if name is not None}
    return replace(head, tensors=tensors, tower=0)


def refuse_other_model(
    place: Path, folder: Path, stored: Iterable[FileEntry], config: ModelConfig
) -> None:
    """Raise CheckpointError if the head's hidden size or vocabulary is not the model's."""
    raw = read_text_config(folder)
    for key in ("hidden_size", "vocab_size"):
        theirs, ours = raw.get(key), getattr(config, key)
        if isinstance(theirs, int) and theirs != ours:
            raise CheckpointError(
                f"--mtp {place}: its config.json says {key} {theirs}, the model's is {ours}: this "
                "head is another model's"
            )
    wanted = (config.vocab_size, config.hidden_size)
    for entry in stored:
        if entry.name.endswith(EMBEDDINGS) and entry.floats and entry.shape != wanted:
            raise CheckpointError(
                f"--mtp {place}: tensor {entry.name} has shape {[*entry.shape]}, the model's "
                f"vocabulary and hidden size make it {[*wanted]}: this head is another model's"
            )


def read_head_config(place: Path, folder: Path, config: ModelConfig) -> ModelConfig:
    """Return the configuration of a trunk in `folder` with the modules or the head in `place`."""
    head = open_head(place, config)
    raw = read_head_file(place)
    if find_head(raw) is None:
        modules = count_stored_modules(find_family_of(config), config, head.tensors)
        return load_config(folder, modules)
    names = {name.removeprefix(f"{HEAD_PREFIX}.") for name in head.tensors}
    try:
        joined = join_config(config, raw, names)
    except CheckpointError as error:
        raise CheckpointError(f"--mtp {place}: {error}") from None
    assert joined.head is not None
    return replace(joined, draft_ids=read_drafted_ids(place, joined.head))


def read_drafted_ids(place: Path, config: HeadConfig) -> tuple[int, ...]:
    """Return the trunk's id of each token that a head drafts; () if these are all.

    The tensor d2t has the differences of the two ids in safetensors, the trunk's in GGUF.
    """
    ids: list[int] | None
    if (head := read_gguf_head(place)) is None:
        ids = find_drafted_ids(find_head_files(place))
    elif (tensor := head[0].tensors.get(DRAFT_IDS)) is None:
        ids = None
    else:
        ids = tensor.read().view("<i8").ravel().tolist()
    if ids is None:
        if config.drafted == config.vocab_size:
            return ()
        drafted = f"draft_vocab_size {config.drafted}"
        raise CheckpointError(f"--mtp {place}: {drafted}, but there is no d2t")
    fits = len(set(ids)) == len(ids) == config.drafted
    if not fits or not all(0 <= i < config.vocab_size for i in ids):
        raise CheckpointError(f"--mtp {place}: d2t does not name {config.drafted} tokens")
    return tuple(ids)


def find_drafted_ids(files: Iterable[Path]) -> list[int] | None:
    """Return the trunk's ids that the tensor d2t of safetensors files tells; None without one."""
    for file in files:
        if any(entry.name == DRAFT_IDS for entry in list_entries(file)):
            with safe_open(file, framework="pt") as opened:
                differences = opened.get_tensor(DRAFT_IDS)
            if differences.dim() != 1 or differences.is_floating_point():
                raise CheckpointError(f"{file}: d2t must be a list of integers")
            ids: list[int] = (differences + torch.arange(len(differences))).tolist()
            return ids
    return None


def join_head(checkpoint: Checkpoint, place: Path, config: ModelConfig) -> Checkpoint:
    """Return the checkpoint with the modules of other files in place of its own."""
    head, family = open_head(place, config), find_family_of(config)
    stored = checkpoint.tensors.items()
    trunk = {name: entry for name, entry in stored if not is_module(family, config, name)}
    joined = {entry.file: head.settings for entry in head.tensors.values()}
    return replace(checkpoint, tensors=trunk | {**head.tensors}, joined=joined)


def open_slice(folder: Path, layers: LayersSlice | None, mtp: Path | None = None) -> Checkpoint:
    """List the tensors of a slice, renamed for a model of its layers alone; None: all layers.

    mtp: a file or folder that has the MTP modules.
    """
    checkpoint = open_checkpoint(folder)
    if mtp is not None:
        checkpoint = join_head(checkpoint, mtp, load_config(folder))
    return cut_tensors(checkpoint, layers)


def hash_embedding(checkpoint: Checkpoint) -> str:
    """Return the signs of sums over some rows, as hexadecimal digits.

    Copies of a model in other formats and its fine-tunes have nearly the same signs.
    """
    count = checkpoint.tensors[EMBEDDING].shape[0]
    chosen, start, rows = torch.arange(HASH_BITS) * count // HASH_BITS, 0, list[Tensor]()
    for piece in checkpoint.rows(EMBEDDING):
        inside = (chosen >= start) & (chosen < start + len(piece))
        rows.append(piece[chosen[inside] - start].double())
        start += len(piece)
    first, second = torch.cat(rows).tensor_split(2, dim=1)
    bits = (first.sum(1) > second.sum(1)).tolist()
    return f"{int(''.join(str(int(bit)) for bit in bits), 2):0{HASH_BITS // 4}x}"


def describe_trunk(checkpoint: Checkpoint, name: str) -> dict[str, str]:
    """Return what a head's config.json says of the trunk that it was made for."""
    return {"name": name, HASH: hash_embedding(checkpoint)}


def refuse_other_trunk(checkpoint: Checkpoint, place: Path) -> None:
    """Raise CheckpointError if a head's config.json says that it was made for another trunk."""
    trunk = read_head_file(place).get(TRUNK)
    if not isinstance(trunk, dict) or not re.fullmatch("[0-9a-f]{64}", str(trunk.get(HASH))):
        return
    others = int(hash_embedding(checkpoint), 16) ^ int(trunk[HASH], 16)
    if others.bit_count() > HASH_BITS // 4:  # two models agree in about half
        raise CheckpointError(
            f"--mtp {place}: this head was made for {trunk.get('name')}, whose embedding is another"
        )
