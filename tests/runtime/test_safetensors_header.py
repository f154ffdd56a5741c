"""Headers of safetensors files: as the package reads and writes them."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mtpbuild.runtime.safetensors_header import encode_header, make_header, read_header

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([3, -1])}
NAMES = {"a": "F32", "b": "I64"}


def test_the_package_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    header = make_header((n, NAMES[n], v.shape, v.nbytes) for n, v in TENSORS.items())
    text = encode_header(header, {"format": "pt"})
    assert len(text) % 64 == 0
    path.write_bytes(text + b"".join(v.tobytes() for v in TENSORS.values()))
    found = load_file(path)
    assert {n: v.tolist() for n, v in found.items()} == {n: v.tolist() for n, v in TENSORS.items()}
    assert read_header(path) == (header, {"format": "pt"}, len(text))


def test_what_the_package_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    header, about, start = read_header(path)
    assert about == {}
    for name, value in TENSORS.items():
        entry = header[name]
        assert (entry["dtype"], entry["shape"]) == (NAMES[name], [*value.shape])
        first, last = (start + offset for offset in entry["data_offsets"])
        assert path.read_bytes()[first:last] == value.tobytes()


@pytest.mark.parametrize(
    "raw",
    [b"", b"\x09", (0).to_bytes(8, "little"), (1 << 63).to_bytes(8, "little") + b"{}"]
    + [len(text).to_bytes(8, "little") + text for text in (b"[]", b"3", b"{", b"\xff")],
)
def test_what_is_none(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(raw)
    with pytest.raises(ValueError, match=r"damaged|Expecting|decode"):
        read_header(tmp_path / "x")
