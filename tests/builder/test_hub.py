"""Building by the name of a repository: what is fetched of it, when, and what is said instead."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtpbuild.builder.checkpoint.shards import INDEX, SINGLE
from mtpbuild.builder.compiler import hub as hub_module
from mtpbuild.builder.plan.machine import Disk, Room
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.errors import BuildError, CheckpointError, DownloadError, MissingWeightsError
from mtpbuild.runtime.ranks import Ranks
from tests.support.checkpoints import SMALLEST, random_checkpoint, shard, write_tokenizer
from tests.support.fake_target import quick_target
from tests.support.invoke import invoke, refusal
from tests.support.loopback_hub import (
    COMMIT,
    Hosted,
    LoopbackHub,
    connect,
    name_hub,
    serving,
)
from tests.support.requests import download

NAME = "some/Model-1.5"
NOT_READ = ("README.md", "pytorch_model.bin", "consolidated.safetensors", "merges.txt")
ENDING = "what has been fetched stays, and the same command goes on from there"


@pytest.fixture(scope="module")
def checkpoint(smallest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository's files: three shards, a tokenizer, and some that no build reads."""
    folder = shutil.copytree(smallest, tmp_path_factory.mktemp("hosted") / "model")
    shard(folder)
    write_tokenizer(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text("{}")
    for name in NOT_READ:
        (folder / name).write_text("not read")
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of 12 MB: huggingface_hub writes down 10 MiB at a time."""
    folder = tmp_path_factory.mktemp("hosted") / "large"
    return random_checkpoint(folder, **SMALLEST, vocab_size=45_000)


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """Yield a hub with the model, for this process; the current folder and the cache are empty."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    with serving() as hub:
        hub.repositories[NAME] = Hosted(checkpoint)
        connect(monkeypatch, hub, tmp_path / "hf")
        yield hub


def room(downloads: float, engines: float | None = None, memory: float | None = 1e9) -> Room:
    """Make a machine of one disk, or of two if `engines` is the other one's free bytes."""
    first, second = Disk(1, int(downloads)), Disk(2, int(engines or 0))
    return Room(
        disk=lambda folder: first if engines is None or "hf" in folder.parts else second,
        memory=lambda: None if memory is None else int(memory),
    )


def host(hub: LoopbackHub, files: dict[str, Any], **more: Any) -> None:
    """Let the hub have another repository, x/y, of such files: text, or a JSON object."""
    folder = Path("../hosted").resolve()
    folder.mkdir()
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    hub.repositories["x/y"] = Hosted(folder, **more)


def config(checkpoint: Path, **changes: Any) -> dict[str, Any]:
    return json.loads((checkpoint / "config.json").read_text()) | changes


def build(*flags: str, model: str = NAME) -> str:
    """Build, which must go wrong by one line; returns it."""
    return refusal("build", "--model", model, *flags, code=1)


@pytest.mark.usefixtures("quick")
def test_a_tokenizer_that_is_not_here_yet_is_fetched(
    hub: LoopbackHub,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Other programs fetch weights alone; offline that is said."""
    download(BuildRequest(NAME, (1,)))
    found = find_model(NAME).folder / "tokenizer.json"
    found.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert invoke("build", "--model", NAME, "--nextn", "1")[0] == 0
        assert f"note: {NAME} is here without a tokenizer.json, and HF_HUB_OFFLINE" in caplog.text
    hub.sent.clear()
    download(BuildRequest(NAME, (1,)))
    assert found.is_file()
    assert not any(file.endswith(".safetensors") for file in hub.files)


@pytest.mark.usefixtures("quick")
def test_a_repository_is_fetched_and_built(hub: LoopbackHub, checkpoint: Path) -> None:
    code, out, err = invoke("build", "--model", NAME, "--nextn", "0,1")
    assert (code, err) == (0, "")
    assert out.count("built") == 2
    for nextn in (0, 1):
        manifest = read_manifest(Path(f"engines/Model-1.5_n{nextn}"))
        assert manifest.model.name == NAME
        assert "tokenizer.json" in manifest.files
    read = {path.name for path in checkpoint.iterdir()} - set(NOT_READ)
    assert hub.files == read
    are_weights = [one.file.endswith(".safetensors") for one in hub.sent]
    assert are_weights == [False] * (len(read) - 3) + [True] * 3, "small files come first"
    assert all(hub.bytes_of(name) == [(0, (checkpoint / name).stat().st_size)] for name in read)

    # Then it is here, for every command and without a word to the hub.
    hub.asked.clear()
    code, out, err = invoke("build", "--model", NAME, "--nextn", "1")
    assert (code, err) == (0, "")
    assert "unchanged" in out
    assert find_model(NAME).folder.name == COMMIT
    code, _, err = invoke("quantize", "--model", NAME, "--to", "int8", "--out", "int8")
    assert (code, err) == (0, "")
    assert hub.asked == []


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("revision", ["v1", COMMIT])
def test_a_revision(revision: str) -> None:
    download(BuildRequest(NAME, revision=revision))
    assert find_model(NAME, revision=revision).folder.name == COMMIT
    with pytest.raises(MissingWeightsError):  # nobody has said that it is main
        find_model(NAME)


def test_a_checkpoint_of_one_file(hub: LoopbackHub, smallest: Path) -> None:
    hub.repositories[NAME] = Hosted(smallest)
    download(BuildRequest(NAME))
    assert hub.files == {"config.json", SINGLE}
    assert (find_model(NAME).folder / SINGLE).read_bytes() == (smallest / SINGLE).read_bytes()


@pytest.mark.usefixtures("quick")
def test_what_needs_no_download(hub: LoopbackHub, checkpoint: Path) -> None:
    """A folder of the repository's name, and one that holds its weights."""
    flags = ("build", "--model", NAME, "--nextn", "0")
    assert invoke(*flags, "--checkpoint", checkpoint)[0] == 0
    assert read_manifest(Path("engines/Model-1.5_n0")).model.name == NAME
    shutil.copytree(checkpoint, NAME)
    assert invoke(*flags, "--force")[0] == 0
    assert read_manifest(Path("engines/Model-1.5_n0")).model.name == "Model-1.5"
    assert hub.asked == []


def test_a_recipes_repository(hub: LoopbackHub, checkpoint: Path) -> None:
    hub.repositories["deepseek-ai/DeepSeek-V3"] = Hosted(checkpoint)
    download(BuildRequest("deepseek-ai/DeepSeek-V3"))
    found = find_model("deepseek-v3")
    assert (found.name, found.engine, found.folder.name) == ("deepseek-v3", "v3", COMMIT)


def test_only_build_downloads(hub: LoopbackHub) -> None:
    says = "the repository is not downloaded here: `mtpbuild build --model some/Model-1.5` or"
    assert says in build("--dry-run")
    for command in (("quantize", "--to", "int8", "--out", "out"), ("bench", "--nextn", "0")):
        code, _, err = invoke(*command, "--model", NAME)
        assert (code, says in err) == (1, True)
    assert hub.asked == []


def test_a_plan_fetches_the_configuration_alone(hub: LoopbackHub, checkpoint: Path) -> None:
    for cpu in ((), ("--cpu", "--bandwidth", "9")):
        code, out, err = invoke("plan", "--model", NAME, "--json", *cpu)
        assert (code, err) == (0, "")
        assert json.loads(out)["model"] == NAME
    assert json.loads(out)["download_bytes"] > 0
    assert hub.files == {"config.json"}
    (folder := Path("alone")).mkdir()
    shutil.copyfile(checkpoint / "config.json", folder / "config.json")
    assert json.loads(invoke("plan", "--model", folder, "--json")[1])["model"] == "alone"


def test_a_cut_is_mended(hub: LoopbackHub, large: Path) -> None:
    """The same download goes on behind what was written down."""
    hub.repositories[NAME] = Hosted(large)
    size, kept = (large / SINGLE).stat().st_size, constants.DOWNLOAD_CHUNK_SIZE
    hub.cuts[SINGLE] = [kept + 1000]
    download(BuildRequest(NAME))
    assert hub.bytes_of(SINGLE) == [(0, kept + 1000), (kept, size - kept)]
    assert (find_model(NAME).folder / SINGLE).read_bytes() == (large / SINGLE).read_bytes()


@pytest.mark.usefixtures("quick")
def test_a_download_that_was_interrupted_goes_on(hub: LoopbackHub, large: Path) -> None:
    hub.repositories[NAME] = Hosted(large)
    size, kept = (large / SINGLE).stat().st_size, constants.DOWNLOAD_CHUNK_SIZE
    hub.cuts[SINGLE], hub.down_after_cut = [kept + 1000], True
    assert build("--nextn", "0") == f"{hub.url} answers 503 for {NAME}; {ENDING}"
    assert "is not downloaded here" in build("--dry-run")
    assert not Path("engines").exists()

    hub.down_after_cut = False
    hub.sent.clear()
    assert invoke("build", "--model", NAME, "--nextn", "0")[0] == 0
    assert [(one.file, one.first, one.count) for one in hub.sent] == [(SINGLE, kept, size - kept)]
    assert (find_model(NAME).folder / SINGLE).read_bytes() == (large / SINGLE).read_bytes()


def test_parts_that_make_no_whole_are_fetched_anew(hub: LoopbackHub, checkpoint: Path) -> None:
    download(BuildRequest(NAME))
    link = next(find_model(NAME).folder.glob("model-*1-of-*"))
    blob = link.resolve()
    link.unlink()
    blob.with_name(f"{blob.name}.incomplete").write_bytes(b"\0" * 100)
    blob.unlink()
    assert build("--nextn", "0") == (
        f"{NAME}: {link.name} came damaged; the same command fetches it anew"
    )
    hub.sent.clear()
    download(BuildRequest(NAME))
    assert hub.bytes_of(link.name) == [(0, (checkpoint / link.name).stat().st_size)]


def test_a_full_disk(hub: LoopbackHub, checkpoint: Path, tmp_path: Path) -> None:
    """What is wanted is told before weights are fetched; what is there already is not wanted."""
    shards = {path.name: path.stat().st_size for path in checkpoint.glob("model-*")}
    total = sum(shards.values())
    with pytest.raises(DownloadError) as caught:
        download(BuildRequest(NAME), room(total - 1))
    assert str(caught.value) == (
        f"{NAME}: {total / 1e3:.2f} kB are to be fetched, and the disk of "
        f"{tmp_path / 'hf' / 'hub'} has {(total - 1) / 1e3:.2f} kB free; HF_HUB_CACHE names "
        "another folder"
    )
    assert not hub.files & shards.keys()
    download(BuildRequest(NAME), room(total, engines=10**9))
    find_model(NAME).folder.joinpath(next(iter(shards))).unlink()
    download(BuildRequest(NAME), room(0))  # its contents are there


@pytest.mark.parametrize(
    ("scheme", "here", "says"),
    [
        (None, room(1e12, memory=64e9), None),
        (None, room(1e12, memory=None), None),
        (
            None,
            room(1e12, memory=48e9),
            "the engine needs 49.03 GB of memory, and this machine has 48.00 GB; --weights int4 "
            "makes one of 6.53 GB; to build it for another machine, fetch the checkpoint by `hf "
            "download x/y`",
        ),
        ("int8", room(1e12, memory=13.0e9), "--weights int4 makes one of 6.53 GB; to build it for"),
        ("int4", room(1e12, memory=7.5e9), None),
        (
            "int4",
            room(1e12, memory=7e9),
            "needs 7.44 GB of memory, and this machine has 7.00 GB; to",
        ),
        (
            None,
            room(44e9, memory=64e9),
            "the engine takes 44.34 GB, and beside the download the disk of {place} has 44.00 GB "
            "free; --weights int4 makes one of 6.53 GB; --out names another place",
        ),
        (
            "int4",
            room(1e9, engines=6e9, memory=64e9),
            "the engine takes 6.53 GB, and beside the download the di",
        ),
        ("int4", room(1e9, engines=7e9, memory=64e9), None),
    ],
)
def test_an_engine_without_room(
    scheme: str | None, here: Room, says: str | None, hub: LoopbackHub
) -> None:
    """Disk and memory that GigaChat3's engine needs are told before its weights are fetched."""
    shape = (Path(__file__).parents[2] / "recipes/gigachat3_10b/config.json").read_text()
    host(hub, {"config.json": shape, SINGLE: "weights"})
    request = BuildRequest("x/y", (3,), scheme=build_scheme(scheme))
    place = Path("engines").resolve()
    # With room the file's header is read next, and it is none.
    error = CheckpointError if says is None else DownloadError
    says = says or "not a readable safetensors file"
    with pytest.raises(error, match=re.escape(says.format(place=place))):
        download(request, here)
    assert (SINGLE in hub.peeked) == (error is CheckpointError)


def test_ranks_may_be_built_on_other_machines(hub: LoopbackHub) -> None:
    """Of two ranks one is counted: half of the products, all of norms and router."""
    shape = (Path(__file__).parents[2] / "recipes/gigachat3_10b/config.json").read_text()
    host(hub, {"config.json": shape, SINGLE: "weights"})
    request = BuildRequest("x/y", (1,), target="inductor", ranks=Ranks(2))
    with pytest.raises(DownloadError, match=r"the engine takes 22\.22 GB, and beside"):
        download(request, room(20e9, memory=64e9))
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        download(request, room(30e9, memory=64e9))


NORM = "model.norm.weight"
TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop(NORM), f"{NAME}: missing tensor {NORM}"),
    "left over": (lambda t: t.update(x=t[NORM].clone()), "this architecture does not have: x"),
    "shape": (lambda t: t.update({NORM: torch.ones(33)}), f"tensor {NORM} has shape [33], config."),
    "dtype": (lambda t: t.update({NORM: t[NORM].double()}), f"tensor {NORM} is F64; supported: B"),
    "head": (
        lambda t: [t.pop(name) for name in [*t] if ".layers.1." in name],
        "num_nextn_predict_layers 1, but MTP layer model.layers.1 is missing",
    ),
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("damage", TENSORS)
def test_tensors_are_checked_before_weights_are_fetched(
    damage: str, sharded: bool, hub: LoopbackHub, smallest: Path, tmp_path: Path
) -> None:
    """By the headers, whose bytes alone come first."""
    folder = shutil.copytree(smallest, tmp_path / "damaged")
    change, says = TENSORS[damage]
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)
    if sharded:
        shard(folder)
    hub.repositories[NAME] = Hosted(folder)
    assert says in build("--nextn", "1")
    assert not any(name.endswith(".safetensors") for name in hub.files)
    assert all(size <= 100_000 for size in hub.peeked.values())


def test_a_long_header_takes_a_second_request(hub: LoopbackHub, smallest: Path) -> None:
    length = 8 + int.from_bytes((smallest / SINGLE).read_bytes()[:8], "little")
    hub.repositories[NAME] = Hosted(smallest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub_module, "START", 100)
        download(BuildRequest(NAME))
    assert hub.peeked == {SINGLE: length}


def test_what_the_hub_refuses(hub: LoopbackHub, checkpoint: Path) -> None:
    hub.repositories["some/gated"] = Hosted(checkpoint, gated=True)
    assert build(model="some/gated") == (
        f"some/gated is gated: ask for access at {hub.url}/some/gated, then set HF_TOKEN or run "
        "`hf auth login`"
    )
    assert build(model="some/nothing") == (
        f"some/nothing is neither a folder here nor a repository of {hub.url} (a private one needs "
        "an HF_TOKEN that may read it)"
    )
    assert build("--revision", "v2") == f"{NAME} has no revision v2: name a branch, tag or commit"
    assert "some/a--b is no folder here, and can't be a repository: " in build(model="some/a--b")


def test_a_token_opens_a_private_repository(
    hub: LoopbackHub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is shown to the hub alone, not to where the hub has its large files."""
    hub.repositories[NAME] = Hosted(checkpoint, token="secret")
    assert "an HF_TOKEN that may read it" in build()
    monkeypatch.setenv("HF_TOKEN", "secret")
    download(BuildRequest(NAME))
    shown = {(one.file.endswith(".safetensors"), one.token) for one in hub.sent}
    assert shown == {(False, "secret"), (True, None)}


def test_offline(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert build() == (
        f"HF_HUB_OFFLINE is set, and {NAME} is neither a folder nor downloaded here: unset it, or "
        "name a folder that has it with --checkpoint"
    )
    assert build(model=f"{NAME}:Q4_K_M").startswith("HF_HUB_OFFLINE is set, and ")
    assert refusal("plan", "--model", NAME, code=1) == build()
    assert hub.asked == []


def test_no_connection(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    name_hub(monkeypatch, "http://127.0.0.1:1")
    line = build()
    assert line.startswith("http://127.0.0.1:1 can't be reached (")
    assert line.endswith(
        f"), and {NAME} is neither a folder nor downloaded here: run the same command when it can, "
        "which goes on with what has been fetched, or name a folder that has it with --checkpoint"
    )


def test_not_a_hub(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the page of a network that wants a log-in first."""
    host(hub, {"a": "<html>"})
    name_hub(monkeypatch, f"{hub.url}/storage/x/y//a?")
    assert "does not answer as a Hugging Face hub does" in build()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            {"a-Q4_0.gguf": "GGUF", "b.gguf": "GGUF"},
            "x/y has only GGUF files: name one, as --model x/y:Q4_0; there are: a-Q4_0, b; it was "
            "made from --model base/model",
        ),
        ({"README.md": ""}, "no config.json; give a Hugging Face checkpoint folder"),
        ({"pytorch_model.bin": "", "config.json": {}}, f"x/y: neither {SINGLE} nor {INDEX}, and"),
        ({"config.json": {"model_type": "gpt2"}}, "unsupported architecture gpt2; supported: De"),
        ({"config.json": {"quantization_config": {"quant_method": "hqq"}}}, "quantised as hqq are"),
        (
            {"config.json": {}, "tiktoken.model": "x"},
            "x/y: tiktoken.model is not read: put a tokenizer.json with equal ids beside it (made "
            "with transformers' convert_slow_tokenizer, say), in a local folder that --model or "
            "--checkpoint names",
        ),
        ({"config.json": {}, INDEX: {"weight_map": {"a": "b"}}}, f"x/y: {INDEX} names b, which is"),
        ({"config.json": {}, INDEX: {"weight_map": {"a": "/b"}}}, "shard '/b' is not a file name"),
        ({"config.json": {}, INDEX: {"weight_map": {"a": "b"}}, "b": ""}, "x/y/b: not a readable"),
        (
            {"config.json": {"model_type": "gpt2", "quantization_config": {"quant_method": "x"}}},
            "unsupported architecture gpt2",
        ),
    ],
)
def test_what_is_refused_before_weights_are_fetched(
    files: dict[str, Any], says: str, hub: LoopbackHub, checkpoint: Path
) -> None:
    if "config.json" in files:
        files = files | {"config.json": config(checkpoint, **files["config.json"])}
        if "gpt2" in says:
            files["config.json"].pop("architectures")
    if INDEX not in files and "pytorch_model.bin" not in files and "b.gguf" not in files:
        files = files | {SINGLE: "weights"}
    host(hub, files, card={"base_model": "base/model"})
    assert says in build(model="x/y")
    assert SINGLE not in hub.files


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--nextn", "2", "--drafter", "mtp-vanilla"), "needs 2 MTP modules"),
        (("--nextn", "0", "--max-seq-len", "2"), "--max-seq-len 2 is outside"),
        (("--target", "inductor", "--nextn", "auto"), "--nextn auto is for target onnxruntime"),
    ],
)
def test_flags_are_checked_before_weights_are_fetched(
    flags: tuple[str, ...], says: str, hub: LoopbackHub
) -> None:
    code, _, err = invoke("build", "--model", NAME, *flags)
    assert (code, says in err) == (2, True), err
    assert not any(name.endswith(".safetensors") for name in hub.files)


def test_what_can_not_be_compiled_here_is_not_fetched(hub: LoopbackHub) -> None:
    def check_machine(plan: Plan) -> None:
        raise BuildError("no compiler")

    with quick_target("onnxruntime", check_machine=check_machine):
        assert build() == "no compiler"
    assert hub.files == {"config.json", "tokenizer.json", "tokenizer_config.json", INDEX}


@pytest.mark.parametrize(
    ("quantised", "modelopt", "says"),
    [
        (None, None, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None, None),
        ({"quant_method": "mtpbuild", "fmt": "int4"}, None, None),
        (None, {"quant_algo": "NVFP4"}, None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, None, None),
        ({"quant_method": "modelopt"}, {"quant_algo": "NVFP4"}, None),
        (None, {"quant_algo": "FP8"}, None),
        (None, {"quant_algo": "FP8_PB_WO"}, "modelopt FP8_PB_WO"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED"}, None, "modelopt MIXED"),
        ({"quant_method": "fp8"}, None, "fp8 without blocks"),
        ({"quant_method": "fp8", "weight_block_size": [1, 128]}, None, "fp8 with weight_block_si"),
        ({"quant_method": "gptq", "bits": 4}, None, None),
        ({"quant_method": "gptq", "bits": 3}, None, "gptq with 3 bits"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, None, "gptq in the layout marl"),
        ({"quant_method": "awq", "version": "gemv"}, None, "awq in the layout gemv"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, None, None),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
            None,
            "compressed-tensors m",
        ),
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, None, "bitsandbytes"),
    ],
)
def test_formats_of_a_folder(
    quantised: Any, modelopt: Any, says: str | None, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(config(checkpoint) | {"quantization_config": quantised})
    )
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": modelopt}))
    refused = ""
    try:
        find_model(str(tmp_path))
    except CheckpointError as error:
        refused = str(error)
    assert (f"weights quantised as {says}" in refused) if says else not refused


def test_a_class_is_refused_before_its_number_format(checkpoint: Path, tmp_path: Path) -> None:
    raw = config(checkpoint, model_type="gpt2", quantization_config={"quant_method": "x"})
    raw["architectures"] = ["GPT2LMHeadModel"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="unsupported architecture GPT2LMHeadModel"):
        find_model(str(tmp_path))


def test_folders_are_refused_by_the_same_lines(smallest: Path, tmp_path: Path) -> None:
    file = "DeepSeek-R1-Q4_K_M.gguf"
    assert build(model=file) == f"{file}: no such file"
    folder = shutil.copytree(smallest, tmp_path / "tiktoken")
    (folder / "tiktoken.model").touch()
    assert f"{folder}: tiktoken.model is not read: put a tokenizer.json" in build(model=str(folder))


def test_a_process_of_its_own(hub: LoopbackHub, tmp_path: Path) -> None:
    """The environment says where from, where to and as whom; nothing else is printed."""
    code = "from mtpbuild.builder.cli import app; app()"
    run = [sys.executable, "-c", code, "build", "--model", NAME, "--max-seq-len", "2"]
    hub.repositories[NAME].token = "secret"
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "own"), "HF_HUB_OFFLINE": "0"}
    own["HF_TOKEN"] = "secret"

    def error(**env: str) -> str:
        done = subprocess.run(run, env=own | env, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    assert error() == "error: --max-seq-len 2 is outside 5..16777216\n"
    assert hub.files == {"config.json", "tokenizer.json", "tokenizer_config.json", INDEX}
    assert (tmp_path / "own" / "hub").is_dir()
    assert error(HF_HUB_OFFLINE="1").startswith(f"error: HF_HUB_OFFLINE is set, and {NAME} is ")
