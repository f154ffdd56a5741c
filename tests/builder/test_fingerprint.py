"""What a checkpoint's files are known by: a change of weights is another build."""

import json
import os
import shutil
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest

from mtpbuild.builder.compiler import fingerprint as module
from mtpbuild.builder.compiler.fingerprint import (
    EVERY,
    SAMPLE,
    SMALL,
    WHOLE,
    hash_files,
    hash_samples,
)


def holes(path: Path, header: object, size: int) -> int:
    """Write a file of so many zeros after a header, if there is one; returns where they begin."""
    text = b"" if header is None else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    start = path.stat().st_size
    os.truncate(path, start + size)
    return start


def write_at(path: Path, place: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)


def test_a_large_file_is_known_by_its_tensors(tmp_path: Path) -> None:
    """The header and small tensors count whole; of a large one 4 KB in any MiB do."""
    path, large = tmp_path / "model.safetensors", 3 * EVERY + 5
    ends = [0, WHOLE, WHOLE + large, WHOLE + large + WHOLE + 1, WHOLE + large + WHOLE + 3]
    header = {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in zip("abcd", pairwise(ends), strict=True)
    }
    header["e"] = {"dtype": "U8", "shape": [0], "data_offsets": [ends[-1], ends[-1]]}
    start = holes(path, header, ends[-1])
    blank = path.read_bytes()

    def changed(place: int, count: int = 1) -> bool:
        write_at(path, start + place, b"x" * count)
        after = hash_samples(path, hash_limit=1 << 20)
        write_at(path, start + place, b"\0" * count)
        return after != before

    before = hash_samples(path, hash_limit=1 << 20)
    small = (0, SAMPLE + 7, WHOLE - 1, ends[2], ends[2] + SAMPLE - 1, ends[3], ends[-1] - 1)
    assert all(map(changed, small))
    assert changed(WHOLE, large)
    windows = (0, 1, SAMPLE, EVERY + SAMPLE, 123_457, large - EVERY)
    assert all(changed(WHOLE + at, EVERY) for at in windows)
    assert not changed(WHOLE + SAMPLE), "or it is hashed whole"
    write_at(path, 9, b"A")  # a name in the header
    assert hash_samples(path, hash_limit=1 << 20) != before
    write_at(path, 9, blank[9:10])
    assert hash_samples(path, hash_limit=1 << 20) == before


def test_what_is_read_of_a_large_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers and small files whole, a sample a MiB and a tensor; each file is told of."""
    size, tensors = 2 * EVERY, 8
    header = {
        f"expert.{n}": {"dtype": "U8", "shape": [size], "data_offsets": [n * size, (n + 1) * size]}
        for n in range(tensors)
    }
    read, told, start = list[int](), list[str](), 0
    for number in (1, 2):
        start += holes(tmp_path / f"model-0000{number}-of-00002.safetensors", header, 8 * size)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(module, "HASH_LIMIT", tensors * size)  # both together are larger
    monkeypatch.setattr(module, "SMALL", 1 << 20)
    pread = os.pread

    def note(file: int, count: int, at: int) -> bytes:
        read.append(count)
        return pread(file, count, at)

    monkeypatch.setattr(os, "pread", note)
    before = hash_files(tmp_path, told.append)
    assert sum(read) == start + 2 * tensors * 3 * SAMPLE
    assert [line.partition(",")[0] for line in told] == [
        f"fingerprint: file {number} of 3" for number in (1, 2, 3)
    ]
    (tmp_path / "config.json").write_text("[]")
    after = hash_files(tmp_path)
    assert [name for name in before if before[name] != after[name]] == ["config.json"]


def test_a_large_gguf_is_known_by_each_tensor(tmp_path: Path) -> None:
    """Its small tensors count, too, wherever they lie."""
    path, norm = tmp_path / "m.gguf", np.arange(99, dtype=np.float32)
    writer = gguf.GGUFWriter(path, "qwen3")
    for name, tensor in (("a", np.zeros((600, 500), np.float32)), ("b", norm)):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    seen, blank = {hash_samples(path, hash_limit=1 << 10)}, path.read_bytes()
    place = blank.rindex(norm.tobytes())
    for at in (place, place + norm.nbytes - 1, blank.index(b"qwen3")):
        write_at(path, at, b"x")
        seen.add(hash_samples(path, hash_limit=1 << 10))
        write_at(path, at, blank[at : at + 1])
    assert len(seen) == 4


@pytest.mark.parametrize(
    "header",
    [
        None,
        [],
        {"a": 5},
        {"a": {"data_offsets": [0, 1]}},
        {"a": {"data_offsets": [0.0, 1e6]}},
        {"a": {"data_offsets": [0, 1 << 60]}},
        {"a": {"data_offsets": [0, SMALL]}, "b": {"data_offsets": [0, 2 * SMALL]}},
    ],
)
def test_a_large_file_without_a_header_of_tensors(header: object, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    start = holes(path, header, 2 * SMALL)
    before = hash_samples(path, hash_limit=1 << 20)
    for place in (0, SMALL + SAMPLE, 2 * SMALL - EVERY):
        write_at(path, start + place, b"x" * EVERY)
        assert hash_samples(path, hash_limit=1 << 20) != before
        write_at(path, start + place, b"\0" * EVERY)
    assert hash_samples(path, hash_limit=1 << 20) == before


def test_a_large_file_is_the_same_on_any_machine(tmp_path: Path) -> None:
    """Neither time stamps nor places count; the size does."""
    path, copy = tmp_path / "model.safetensors", tmp_path / "copy.safetensors"
    holes(path, None, 2 * SMALL)
    before = hash_samples(path, hash_limit=1 << 20)
    shutil.copyfile(path, copy)
    os.utime(copy, (1, 1))
    assert hash_samples(copy, hash_limit=1 << 20) == before
    os.truncate(copy, copy.stat().st_size + 1)
    assert hash_samples(copy, hash_limit=1 << 20) != before
