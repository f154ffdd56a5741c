"""GGUF files of a hub's repository, which `OWNER/NAME:FORMAT` names."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter

from mtpbuild.builder.compiler.source import find_source
from mtpbuild.builder.gguf.choice import choose_head, choose_model
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.builder.weights.head import open_head
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.errors import CheckpointError
from tests.support.gemma4 import make_assistant, make_trunk
from tests.support.gemma4_gguf import write_head, write_trunk
from tests.support.gguf_files import random_tensors, split_head, usual, write_gguf
from tests.support.invoke import invoke, refusal
from tests.support.loopback_hub import Hosted, LoopbackHub, connect, serving
from tests.support.requests import download

NAME = "some/Qwen-GGUF"
START = 1_000_000  # bytes that are asked for at first


def with_many_tokens(writer: GGUFWriter) -> None:
    """Make the header longer than what is asked for at first."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("not-known")
    writer.add_token_list([f"{i:0100}" for i in range(15_000)])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of a model, one in two shards and without its head, which lies beside."""
    folder = tmp_path_factory.mktemp("gguf")
    c, tensors = random_tensors("qwen3.5")
    small = usual(Type.Q8_0)
    write_gguf(folder / "Qwen-Q4_0.gguf", c, tensors, usual(Type.Q4_0), more=with_many_tokens)
    trunk, head = split_head(tensors, c["num_hidden_layers"])
    names = [*trunk]
    for i, part in enumerate((names[:20], names[20:]), start=1):
        own = c | {"mtp_num_hidden_layers": 0}
        file = folder / f"Qwen-Q8_0-{i:05}-of-00002.gguf"
        write_gguf(file, own, {name: trunk[name] for name in part}, small)
    write_gguf(folder / "mtp-Qwen.gguf", c, head, small)
    (folder / "mmproj-Q8_0.gguf").write_text("not read")
    return folder


@pytest.fixture
def hub(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    (work := tmp_path / "work").mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving() as hub:
        hub.repositories[NAME] = Hosted(files)
        connect(monkeypatch, hub, tmp_path / "hf")
        yield hub


@pytest.mark.usefixtures("quick")
def test_a_file_is_fetched_and_built(hub: LoopbackHub, files: Path) -> None:
    code, out, err = invoke("build", "--model", f"{NAME}:q4_0", "--nextn", "1")
    assert (code, err) == (0, "")
    assert "built" in out
    file = "Qwen-Q4_0.gguf"
    assert hub.files == {file}
    assert hub.bytes_of(file) == [(0, (files / file).stat().st_size)]
    assert hub.peeked[file] > START  # the header is longer
    assert read_manifest(Path("engines/Qwen-GGUF-q4_0_n1")).model.name == f"{NAME}:q4_0"
    hub.asked.clear()
    assert "unchanged" in invoke("build", "--model", f"{NAME}:q4_0", "--nextn", "1")[1]
    assert hub.asked == []


def test_shards_and_the_head_beside(hub: LoopbackHub, files: Path) -> None:
    download(BuildRequest(f"{NAME}:Q8_0", (1,)))
    assert hub.files == {path.name for path in files.glob("*Qwen-Q8*")} | {"mtp-Qwen.gguf"}
    checkpoint = open_checkpoint(find_model(f"{NAME}:Q8_0").folder)
    local = open_checkpoint(find_model(str(files / "Qwen-Q8_0-00001-of-00002.gguf")).folder)
    assert checkpoint.tensors.keys() == local.tensors.keys()
    assert "mtp.fc.weight" in local.tensors


def test_a_folder_of_heads(hub: LoopbackHub, tmp_path: Path) -> None:
    folder, name, head = tmp_path / "hosted", "gemma-Q8_0.gguf", "gemma-head-Q8_0.gguf"
    write_trunk(folder / name, make_trunk("dense"))
    write_head(folder / "MTP" / head, make_assistant("dense"))
    hub.repositories["x/y"] = Hosted(folder)
    download(BuildRequest("x/y:Q8_0", (0,)))
    assert hub.files == {name}
    shutil.rmtree(tmp_path / "hf")
    request = BuildRequest("x/y:Q8_0", (3,))
    download(request)
    assert hub.files == {name, head}
    source = find_source(request)
    assert source.mtp is not None
    assert open_head(source.mtp, source.config).tensors.keys() >= {"head.pre_projection.weight"}


def test_what_is_wrong_is_told_by_the_header(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No byte of the weights is fetched, and nothing stays in the cache."""
    (folder := tmp_path / "hosted").mkdir()
    hub.repositories["x/y"] = Hosted(folder)
    c, tensors = random_tensors("qwen3.5")
    trunk, _ = split_head(tensors, c["num_hidden_layers"])
    usual_type = usual(Type.F32)
    write_gguf(folder / "a-stripped.gguf", c, trunk, usual_type)
    partial = {name: value for name, value in tensors.items() if "3.attn_output" not in name}
    write_gguf(folder / "a-partial.gguf", c, partial, usual_type)
    whole = write_gguf(folder / "a-whole.gguf", c, tensors, usual_type).read_bytes()
    (folder / "a-other.gguf").write_bytes(b"GGML" + whole[4:])
    for tag, says in {
        "stripped": "MTP layer mtp.layers.0 is missing",
        "partial": "missing tensor model.layers.3.self_attn.o_proj.weight",
        "other": "x/y/a-other.gguf: not a GGUF file: it does not begin with GGUF",
    }.items():
        line = refusal("build", "--model", f"x/y:{tag}", "--nextn", "1", code=1)
        assert says in line
        assert "/tmp" not in line
    assert hub.files == set()
    assert not [*(tmp_path / "cache").rglob("*.json")]
    line = refusal("build", "--model", "x/y:Q2_K", code=1)
    assert line == (
        "x/y: no GGUF file is named Q2_K; there are: a-other, a-partial, a-stripped, a-whole"
    )


def test_plan_reads_the_header_alone(hub: LoopbackHub) -> None:
    code, out, err = invoke("plan", "--model", f"{NAME}:Q8_0", "--cpu")
    assert (code, err) == (0, "")
    assert "Qwen-GGUF" in out
    assert hub.files == set()


NAMES = [
    "M-Q4_K_M.gguf", "M-UD-Q4_K_XL.gguf", "M-Q4_K_S.gguf", "Q8_0/M-Q8_0-00002-of-00002.gguf",
    "Q8_0/M-Q8_0-00001-of-00002.gguf", "M.i1-Q4_K_S.gguf", "mmproj-Q4_K_M.gguf", "mtp-M.gguf",
    "README.md",
]  # fmt: skip


@pytest.mark.parametrize(
    ("tag", "chosen"),
    [
        ("q4_k_m", NAMES[:1]),
        ("Q4_K_XL", NAMES[1:2]),
        ("UD-Q4_K_XL", NAMES[1:2]),
        ("q8_0", sorted(NAMES[3:5])),
        ("M-Q4_K_S", NAMES[2:3]),
        ("M-Q4_K_M.gguf", NAMES[:1]),
        ("i1-Q4_K_S", NAMES[5:6]),
    ],
)
def test_names(tag: str, chosen: list[str]) -> None:
    assert choose_model("x/y", NAMES, tag) == chosen


def test_names_that_are_not_clear() -> None:
    says = r"x/y: several GGUF files are named Q4_K_S; there are: M-Q4_K_S, M\.i1-Q4_K_S$"
    with pytest.raises(CheckpointError, match=says):
        choose_model("x/y", NAMES, "Q4_K_S")
    with pytest.raises(CheckpointError, match="no GGUF file is named 4_K_M; there are: M-Q4_K_M, "):
        choose_model("x/y", NAMES, "4_K_M")
    with pytest.raises(CheckpointError, match="there are: none"):
        choose_model("x/y", ["README.md"], "Q8_0")
    more: list[Any] = ["mtp-M-Q4_K_M.gguf", "mtp-N.gguf"]
    assert choose_head("M-Q4_K_M.gguf", [*NAMES, *more]) == more[:1]
    assert choose_head("M-Q4_K_M.gguf", NAMES) == ["mtp-M.gguf"]
    assert choose_head("M.gguf", [*NAMES, more[1], "mtp-O.gguf"]) == ["mtp-M.gguf"]
    assert choose_head("Q8_0/M.gguf", NAMES) == []
