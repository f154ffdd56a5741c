"""What a checkpoint's files are known by: a change of weights is another build."""

import json
import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from mtpbuild.builder.compiler.fingerprint import EVERY, SAMPLE, SMALL, identity


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
    """Any byte of a small tensor counts; of a large one at least 4 KB in any 64 KB do."""
    path, large = tmp_path / "model.safetensors", SMALL + 3 * EVERY + 5
    ends = [0, SMALL, SMALL + large, SMALL + large + 70_000]
    header = {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in zip("abc", pairwise(ends), strict=True)
    }
    start = holes(path, header, ends[-1])
    blank = path.read_bytes()

    def changed(place: int, count: int = 1) -> bool:
        write_at(path, start + place, b"x" * count)
        found = identity(path, hash_limit=1 << 20)
        write_at(path, start + place, b"\0" * count)
        return found != before

    before = identity(path, hash_limit=1 << 20)
    small = (0, 5 * SAMPLE + 7, SMALL - 1, SMALL + large, SMALL + large + 65_537, ends[-1] - 1)
    assert all(map(changed, small))
    assert changed(SMALL, large)
    windows = (0, 1, SAMPLE, 3 * EVERY + SAMPLE, 123_457, large - EVERY)
    assert all(changed(SMALL + at, EVERY) for at in windows)
    assert not changed(SMALL + SAMPLE), "or it is hashed whole"
    write_at(path, 9, b"A")  # a name in the header
    assert identity(path, hash_limit=1 << 20) != before
    write_at(path, 9, blank[9:10])
    assert identity(path, hash_limit=1 << 20) == before


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
    before = identity(path, hash_limit=1 << 20)
    for place in (0, 3 * EVERY + SAMPLE, 2 * SMALL - EVERY):
        write_at(path, start + place, b"x" * EVERY)
        assert identity(path, hash_limit=1 << 20) != before
        write_at(path, start + place, b"\0" * EVERY)
    assert identity(path, hash_limit=1 << 20) == before


def test_large_files_are_known_by_samples(tmp_path: Path) -> None:
    """Neither time stamps nor places matter, so any machine knows them."""
    file = tmp_path / "a" / "model.safetensors"
    file.parent.mkdir()
    size = SMALL + 2 * EVERY + 5 * SAMPLE
    file.touch()
    os.truncate(file, size)  # a file of holes

    def of(folder: Path) -> str:
        return identity(folder / "model.safetensors", hash_limit=1 << 20)

    first = of(file.parent)
    copy = shutil.copytree(file.parent, tmp_path / "b")
    os.utime(copy / file.name, (1, 1))
    assert of(copy) == first
    seen = {first}
    for place in (0, EVERY - 1, 2 * (EVERY - SAMPLE), size - 1):
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(b"x")
        seen.add(of(file.parent))
    os.truncate(file, size + 1)
    seen.add(of(file.parent))
    assert len(seen) == 6
