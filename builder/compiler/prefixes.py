"""Prefixes of an engine: beginnings of prompts that are computed once and shipped with it."""

import json
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mtpbuild.builder.engine.layout import change_engine
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import (
    MANIFEST,
    PREFIXES,
    FileSpec,
    Manifest,
    check_files,
    hash_file,
    read_manifest,
)
from mtpbuild.runtime.contract.programs import PrefixCaching
from mtpbuild.runtime.contract.targets import find_target, list_targets_with
from mtpbuild.runtime.errors import EngineError, UsageError
from mtpbuild.runtime.prefix_cache.files import (
    PRIVATE,
    STATES,
    PrefixFiles,
    list_prefix_names,
    name_prefix_file,
    open_prefixes,
)
from mtpbuild.runtime.prefix_cache.tree import RowSpan, count_common, make_root_key
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.text.tokenizer import Tokenizer, load_tokenizer

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PROBES = ("a", "7", "Z", "(")  # continuations; tokens that depend on them are not of the prefix
Computed = Callable[[Sequence[int]], dict[str, NDArray[Any]]]


@dataclass(frozen=True)
class Beginning:
    """The beginning of prompts: a text, a system message, or messages and tools."""

    text: str = ""
    chat: bool = False
    messages: Sequence[dict[str, Any]] = ()
    tools: Sequence[dict[str, Any]] = ()

    def tokens(self, tokenizer: Tokenizer) -> list[int]:
        """Return the token ids that all prompts with this beginning share."""
        if not (self.chat or self.messages):
            return tokenizer.encode(self.text)
        messages = list(self.messages) or [{"role": "system", "content": self.text}]
        options: dict[str, Any] = {"tools": list(self.tools)} if self.tools else {}

        def ids(*more: dict[str, Any]) -> list[int]:
            text = tokenizer.chat_prompt([*messages, *more], **options)
            return tokenizer.encode(text, add_special_tokens=False)

        if messages[-1].get("role") == "user":
            return ids()
        conversations = [ids({"role": "user", "content": probe}) for probe in PROBES]
        common = min(count_common(one, other) for one, other in pairwise(conversations))
        return conversations[0][:common]


def add_prefix(
    engine: Path,
    name: str,
    beginning: Beginning,
    threads: int | None = None,
    *,
    private: bool = False,
) -> int:
    """Compute a prefix and put it into an engine; return its number of tokens.

    A prefix of the same name is replaced. private: only this user may read it. Raises UsageError or
    EngineError; the engine is then as it was. An engine that is already loaded runs on without the
    prefix.
    """
    _check_name(name)
    manifest = _read_unsplit(engine)
    tokenizer = load_tokenizer(engine, manifest)
    if tokenizer is None:
        raise UsageError(f"{engine}: built without a tokenizer, so a text has no token ids")
    tokens = beginning.tokens(tokenizer)
    compute = load_prefix_function(engine, manifest, threads)
    longest, least = manifest.build.max_seq_len - 1, manifest.lookahead + 1
    if not least <= len(tokens) <= longest:
        raise UsageError(f"{name}: {len(tokens)} tokens; this engine takes {least} to {longest}")
    file = name_prefix_file(name)
    mode = PRIVATE if private else stat.S_IMODE((engine / MANIFEST).stat().st_mode)
    with change_engine(engine, manifest.files.keys() - {file}, {file: mode}) as folder:
        write_prefix(folder, manifest, name, tokens, compute(tokens))
        write_manifest(folder, manifest)
    return len(tokens)


def remove_prefix(engine: Path, name: str) -> None:
    """Remove a prefix from an engine."""
    manifest = _read_unsplit(engine)
    if name not in list_prefix_names(manifest):
        has = ", ".join(list_prefix_names(manifest)) or "none"
        raise UsageError(f"{engine}: has no prefix {name} (it has: {has})")
    with change_engine(engine, manifest.files.keys() - {name_prefix_file(name)}) as folder:
        write_manifest(folder, manifest)


def read_files(files: Sequence[Path], target: str, tp: int) -> dict[str, Beginning]:
    """Read a prefix from each file: messages if it ends in .json, else a text; return them by name.

    Raises UsageError for files that can't be read, and if the target's engines of so many ranks
    have no prefixes.
    """
    if files and (tp > 1 or Feature.PREFIX_CACHE not in find_target(target).features):
        raise UsageError(f"--prefix is for engines of {_list_supporting()}")
    for file in files:
        _check_name(file.stem)
    if len({file.stem for file in files}) < len(files):
        raise UsageError("--prefix: two files have the same name, which the prefixes would have")
    return {file.stem: read_beginning(file, messages=file.suffix == ".json") for file in files}


def list_prefixes(engine: Path) -> list[dict[str, Any]]:
    """Return the name, the number of tokens and the bytes of each prefix."""
    manifest = read_manifest(engine)
    check_files(engine, manifest)
    rows = list[dict[str, Any]]()
    for name, file in open_prefixes(engine, manifest):
        size = manifest.files[name_prefix_file(name)].size
        rows.append({"name": name, "tokens": len(file.span.tokens), "bytes": size})
    return rows


def remake_prefixes(old: Path, folder: Path, before: Manifest) -> None:
    """Compute an engine's prefixes again, from their tokens, for an engine with other weights."""
    known = {name: file.span.tokens for name, file in open_prefixes(old, before)}
    if not known:
        return
    manifest = read_manifest(folder)
    compute = load_prefix_function(folder, manifest, None)
    for name, tokens in known.items():
        write_prefix(folder, manifest, name, tokens, compute(tokens))
    write_manifest(folder, manifest)


def load_prefix_function(folder: Path, manifest: Manifest, threads: int | None) -> Computed:
    """Load an engine's programs; return a function that maps tokens to their rows and states."""
    programs = cast(PrefixCaching, load_programs(folder, manifest, threads=threads))
    if Feature.PREFIX_CACHE not in programs.features:
        raise UsageError(f"{folder}: prefixes are for engines of {_list_supporting()}")
    recurrent = any(s.role == "recurrent" for s in manifest.state)

    def compute(tokens: Sequence[int]) -> dict[str, NDArray[Any]]:
        arrays, lookahead = dict[str, NDArray[Any]](), manifest.lookahead
        pieces = list[dict[str, NDArray[Any]]]()
        rows, chunk = len(tokens) - lookahead, manifest.build.prefill_chunk
        for start in range(0, rows, chunk):
            end = min(start + chunk, rows)
            programs.prefill(0, start, np.array(tokens[start : end + lookahead], np.int64))
            # Now, as a later chunk may overwrite them.
            check(programs.save_rows(0, start, [(0, end - start)]))
            pieces.append(dict(programs.saved(0)))
            if recurrent:
                check(programs.save_states(0, 0))
                states = programs.saved(0)
                arrays.update((STATES.format(name, end), array) for name, array in states.items())
        joined = {n: np.concatenate([piece[n] for piece in pieces]) for n in pieces[0]}
        return arrays | joined

    def check(finite: bool) -> None:
        if not finite:
            raise EngineError(f"{folder}: the model's numbers for this prefix are not finite")

    return compute


def write_prefix(
    folder: Path,
    manifest: Manifest,
    name: str,
    tokens: Sequence[int],
    arrays: dict[str, NDArray[Any]],
) -> None:
    path = folder / name_prefix_file(name)
    path.parent.mkdir(exist_ok=True)
    PrefixFiles(manifest).write(path, RowSpan(make_root_key(""), 0, tuple(tokens)), arrays)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest with the prefixes that are in the folder."""
    paths = sorted((folder / PREFIXES).glob("*.safetensors"))
    files = {
        name_prefix_file(path.stem): FileSpec(size=path.stat().st_size, sha256=hash_file(path))
        for path in paths
    }
    kept = {n: spec for n, spec in manifest.files.items() if not n.startswith(f"{PREFIXES}/")}
    changed = manifest.model_copy(update={"files": dict(sorted((kept | files).items()))})
    (folder / MANIFEST).write_text(changed.to_json(), encoding="utf-8")


def read_beginning(
    file: Path, *, messages: bool, chat: bool = False, tools: Path | None = None
) -> Beginning:
    """Read a text or, with `messages`, JSON: messages, or an object with messages and tools."""
    try:
        text = file.read_bytes().decode("utf-8")  # keeps its line ends
        listed_tools = [] if tools is None else json.loads(tools.read_text(encoding="utf-8"))
        if not messages:
            return Beginning(text, chat=chat or tools is not None, tools=listed_tools)
        content = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file}: can't be read ({error})") from None
    content = content if isinstance(content, dict) else {"messages": content}
    listed, listed_tools = content.get("messages"), listed_tools or content.get("tools", [])
    valid = all(
        isinstance(part, list) and all(isinstance(entry, dict) for entry in part)
        for part in (listed, listed_tools)
    )
    if not valid or not listed:
        raise UsageError(f"{file}: a list of messages, or an object with messages and tools")
    return Beginning(messages=listed, tools=listed_tools)


def _read_unsplit(engine: Path) -> Manifest:
    manifest = read_manifest(engine)
    check_files(engine, manifest)
    if manifest.split:
        raise UsageError(
            f"{engine}: an engine of {manifest.build.tp} ranks has no prefixes of its own: build "
            "it for one rank, or let a first prompt that begins so leave its rows to the others"
        )
    return manifest


def _list_supporting() -> str:
    return f"{list_targets_with(Feature.PREFIX_CACHE)}, of one rank"


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise UsageError(
            f"prefix {name}: a name has 1 to 64 letters, digits, dots, dashes and underscores, and "
            "begins with a letter or digit"
        )
