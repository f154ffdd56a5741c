"""Engines whose packed weights and graphs lie, and whose manifest agrees with them.

A file that is damaged by accident is found by its size or its hash (tests/runtime/test_load.py).
Whoever makes an engine makes these, too: nothing that it says may be believed.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import MANIFEST, WEIGHTS
from mtpbuild.runtime.cpu_library import DOMAIN
from mtpbuild.runtime.errors import EngineError
from tests.support.exact_engines import save
from tests.support.requests import build

pytestmark = [pytest.mark.full]
Header = dict[str, Any]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hostile")
    scheme = build_scheme("int4")
    model, out = str(save(place / "model", "few")), place / "engine"
    request = BuildRequest(model, max_seq_len=160, scheme=scheme, nextn=(1,), out=out)
    return build(request)[0].folder


@pytest.fixture
def engine(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "engine", copy_function=os.link))


def rewrite(path: Path, content: bytes) -> None:
    """Write a file anew, and say so in the manifest."""
    path.unlink()
    path.write_bytes(content)
    manifest = path.parent / MANIFEST
    raw = json.loads(manifest.read_text())
    raw["files"][path.name] |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.unlink()
    manifest.write_text(json.dumps(raw))


def refused(folder: Path) -> str:
    """Return the line in which its load ends, or else its run; empty if it runs."""
    output = ""
    try:
        with Engine.load(folder, threads=1) as engine:
            engine.generate([*range(5, 30)], SamplingParams(max_tokens=4, ignore_eos=True))
    except EngineError as error:
        output = str(error)
    assert "\n" not in output
    return output


def split(path: Path) -> tuple[Header, bytes]:
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def joined(header: Header, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


FILES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "seven bytes": lambda raw: raw[:7],
    "cut in its header": lambda raw: raw[:100],
    "cut in a tensor": lambda raw: raw[:-1],
    "longer": lambda raw: raw + b"\0" * 64,
    "a header of 2^63 bytes": lambda raw: (1 << 63).to_bytes(8, "little") + raw[8:],
    "a header of no bytes": lambda raw: (0).to_bytes(8, "little") + raw[8:],
    "a header that is no JSON": lambda raw: raw[:8] + b"\xff" + raw[9:],
}


@pytest.mark.parametrize("kind", [*FILES])
def test_files_that_hold_no_tensors(kind: str, engine: Path) -> None:
    path = engine / WEIGHTS
    rewrite(path, FILES[kind](path.read_bytes()))
    assert refused(engine).startswith(f"{path}: ")


ENTRIES: dict[str, Callable[[Header], object]] = {
    "offsets behind the end": lambda e: e.update(
        data_offsets=[n + (1 << 40) for n in e["data_offsets"]]
    ),
    "negative offsets": lambda e: e.update(data_offsets=[-64, 0]),
    "offsets the wrong way": lambda e: e.update(data_offsets=e["data_offsets"][::-1]),
    "more numbers": lambda e: e.update(shape=[*e["shape"], 1000]),
    "fewer numbers": lambda e: e.update(shape=[1]),
    "negative sizes": lambda e: e.update(shape=[-n for n in e["shape"]]),
    "sizes that overflow": lambda e: e.update(shape=[1 << 62, 4, *e["shape"]]),
    "another type": lambda e: e.update(dtype="F64"),
    "no known type": lambda e: e.update(dtype="complex"),
    "no offsets": lambda e: e.pop("data_offsets"),
    "axes in another order": lambda e: e.update(shape=e["shape"][::-1]),
    "one axis": lambda e: e.update(shape=[int(np.prod(e["shape"]))]),
    "an axis more": lambda e: e.update(shape=[1, *e["shape"]]),
}


@pytest.mark.parametrize("kind", [*ENTRIES])
def test_headers_that_lie(kind: str, engine: Path) -> None:
    """Of the largest packed weight."""
    path = engine / WEIGHTS
    header, data = split(path)
    packed = [e for name, e in header.items() if name != "__metadata__" and e["dtype"] == "U8"]
    ENTRIES[kind](max(packed, key=lambda e: e["data_offsets"][1] - e["data_offsets"][0]))
    rewrite(path, joined(header, data))
    assert refused(engine)


@pytest.mark.parametrize("seed", range(60))
def test_attributes_that_lie(seed: int, engine: Path) -> None:
    """A whole number of one of our nodes is another one: it is refused, or it computes."""
    rng = np.random.default_rng(seed)
    graphs = sorted(engine.glob("*.onnx"))
    path = graphs[seed % len(graphs)]
    model = onnx.load(path, load_external_data=False)
    places = [
        each
        for node in model.graph.node
        if node.domain == DOMAIN
        for each in node.attribute
        if each.type == onnx.AttributeProto.INT
    ]
    place = places[rng.integers(len(places))]
    before = place.i
    place.i = int(rng.choice([-1, 0, 1, place.i + 1, 33, 1 << 31, 1 << 62, -(1 << 63)]))
    rewrite(path, model.SerializeToString())
    output = refused(engine)  # no other exception, and no crash
    assert not output or place.i != before, "the engine as it was is not refused"
