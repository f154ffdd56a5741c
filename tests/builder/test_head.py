"""MTP heads: what is said of missing and partial ones, and how others are joined by --mtp."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtpbuild.builder.checkpoint.shards import INDEX, SINGLE
from mtpbuild.builder.compiler.plans import plan_engines
from mtpbuild.builder.models import load_config
from mtpbuild.builder.program.opened_model import OpenedModel
from mtpbuild.builder.weights.head import open_head
from mtpbuild.runtime.errors import CheckpointError
from tests.support.families import make_family, save_family
from tests.support.invoke import invoke, refusal
from tests.support.requests import build_request

LAYER = "model.layers.1."
Tensors = dict[str, Tensor]


@pytest.fixture
def trunk(smallest: Path, tmp_path: Path) -> Path:
    """Save a checkpoint without its head, of which config.json still tells."""
    folder = shutil.copytree(smallest, tmp_path / "trunk")
    edit(folder, lambda t: [t.pop(name) for name in [*t] if LAYER in name])
    return folder


@pytest.fixture
def head(smallest: Path, tmp_path: Path) -> Path:
    """Save the head of the same model alone, in bf16 and with all weights doubled."""
    (folder := tmp_path / "head").mkdir()
    tensors = load_file(smallest / SINGLE)
    own = {name: 2 * tensor.bfloat16() for name, tensor in tensors.items() if LAYER in name}
    save_file(own, folder / "mtp.safetensors")
    return folder


def edit(folder: Path, change: Callable[[Tensors], Any], file: str = SINGLE) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


def opened(folder: Path, nextn: int, out: Path, **more: Any) -> OpenedModel:
    return plan_engines(build_request(folder, (nextn,), out=out, **more)).open_model()


def read_module(model: OpenedModel) -> Iterator[tuple[str, Tensor]]:
    for name in model.table.stored:
        if LAYER in name:
            yield name, model.checkpoint.read(name)


PARTIAL: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "partial": (
        lambda t: [t.pop(f"{LAYER}{name}.weight") for name in ("eh_proj", "enorm")],
        r"its MTP layers are not whole: missing tensor model.layers.1.eh_proj.weight \(and 1 mo",
    ),
    "of other sizes": (
        lambda t: t.update({f"{LAYER}eh_proj.weight": torch.ones(2, 2)}),
        r"tensor model.layers.1.eh_proj.weight has shape \[2, 2\], config.json makes it",
    ),
}


@pytest.mark.parametrize("damage", PARTIAL)
def test_a_head_that_is_not_whole(damage: str, smallest: Path, tmp_path: Path) -> None:
    """It is refused with a way out, and without drafts it is left out."""
    folder = shutil.copytree(smallest, tmp_path / "partial")
    change, says = PARTIAL[damage]
    edit(folder, change)
    hint = r": build with --nextn 0, or join a whole head with --mtp FILE_OR_FOLDER, such as that"
    with pytest.raises(CheckpointError, match=f"{says}.*{hint}"):
        opened(folder, 1, tmp_path / "n1")
    without = opened(folder, 0, tmp_path / "n0")
    assert without.config.num_nextn_predict_layers == 0
    assert not any(name.startswith("mtp.") for name in without.table.formats)


ATTENTION = "model.layers.0.self_attn"
WHOLE: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "another width": ({"v_head_dim": 24}, (), f"{ATTENTION}.kv_b_proj.weight has shape .*, config"),
    "another vocabulary": ({"vocab_size": 60}, (), "tensor model.embed_tokens.weight has shape"),
    "trunk and head lack tensors": ({}, ("o_proj",), f"missing tensor {ATTENTION}.o_proj.weight"),
    "and there is no head": ({}, ("o_proj", LAYER), f"missing tensor {ATTENTION}.o_proj.weight$"),
}


@pytest.mark.parametrize("fault", WHOLE)
def test_a_fault_of_the_whole_checkpoint(fault: str, smallest: Path, tmp_path: Path) -> None:
    """It is not told as the head's, whom nothing that the message advises would help."""
    values, lost, says = WHOLE[fault]
    folder = shutil.copytree(smallest, tmp_path / "a")
    raw = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(raw))
    edit(folder, lambda t: [t.pop(name) for name in list(t) if any(part in name for part in lost)])
    with pytest.raises(CheckpointError, match=says) as error:
        opened(folder, 1, tmp_path / "n1")
    assert not {"MTP", "--nextn"} & {*str(error.value).split()}


@pytest.mark.parametrize("given", ["folder", "file"])
@pytest.mark.parametrize("count", [0, 1, None])
def test_a_head_is_joined(
    given: str, count: int | None, trunk: Path, head: Path, smallest: Path, tmp_path: Path
) -> None:
    """Whatever config.json says, its tensors are read, each as it is stored."""
    raw = json.loads((trunk / "config.json").read_text()) | {"num_nextn_predict_layers": count}
    (trunk / "config.json").write_text(json.dumps(raw))
    place = head if given == "folder" else head / "mtp.safetensors"
    model = opened(trunk, 1, tmp_path / "n1", mtp=place)
    wanted = load_file(head / "mtp.safetensors")
    read = dict(read_module(model))
    assert read.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name].float()) for name, tensor in read.items())
    whole = opened(smallest, 1, tmp_path / "n1", mtp=place)  # it wins over the checkpoint's own
    assert all(torch.equal(tensor, wanted[name].float()) for name, tensor in read_module(whole))


@pytest.mark.usefixtures("quick")
def test_the_line_about_formats(trunk: Path, head: Path, tmp_path: Path) -> None:
    (out := tmp_path / "out").mkdir()
    flags = ("build", "--model", trunk, "--mtp", head, "--nextn", "1", "--out", out / "engine")
    for more in ((), ("--dry-run", "--force")):
        code, told, err = invoke(*flags, *more)
        assert (code, err) == (0, "")
        assert (
            "trunk f32, held in float32; head f32, held in float32; MTP module bf16, held in fl"
        ) in re.sub(r"\s+", " ", told)
    assert "unchanged" in invoke(*flags)[1]
    edit(head, lambda t: t.update({f"{LAYER}enorm.weight": torch.ones(32)}), "mtp.safetensors")
    assert "unchanged" not in invoke(*flags)[1]  # the head is among what an engine is made of


HEAD_NAMES: dict[str, tuple[str, str, Any]] = {  # a family, and how its names are changed
    "bare": ("qwen3.5", "^mtp[.]", ""),
    "in the model": ("qwen3.5", "^", "model."),
    "in a wrapped model": ("qwen3.5", "^", "model.language_model."),
    "another module's number": ("qwen3.5", r"layers\.0", "layers.7"),
    "SGLang's NextN": ("deepseek", r"layers\.\d+", "layers.0"),
    "SGLang's class": (
        "deepseek", r"model\.layers\.\d+\.(?=(eh_proj|.norm|shared_head)|.*)",
        lambda m: "model." if m[1] else "model.decoder.",
    ),
    "a larger model's number": ("deepseek", r"layers\.\d+", "layers.61"),
    "with mtp": ("deepseek", r"^model\.layers\.\d+", "mtp.layers.0"),
}  # fmt: skip


@pytest.mark.parametrize("what", HEAD_NAMES)
def test_names_of_heads_alone(what: str, smallest: Path, tmp_path: Path) -> None:
    """Modules are known by what only modules have, whatever prefix and number they have."""
    family, old, new = HEAD_NAMES[what]
    folder = smallest
    if family == "qwen3.5":
        folder = save_family(tmp_path / "qwen", "qwen3.5", make_family("qwen3.5"))
    config, tensors = load_config(folder), load_file(folder / SINGLE)
    prefix = "mtp." if family == "qwen3.5" else LAYER
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    names = {re.sub(old, new, name): name for name in own}
    assert names.keys() != own.keys()
    save_file({theirs: own[name] for theirs, name in names.items()}, tmp_path / "h.safetensors")
    head = open_head(tmp_path / "h.safetensors", config)
    assert head.tensors.keys() == own.keys()
    assert all(torch.equal(head.read(name), tensor.float()) for name, tensor in own.items())


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_modules_inside_the_model(prefix: str, tmp_path: Path) -> None:
    folder = save_family(tmp_path / "qwen", "qwen3.5", make_family("qwen3.5"))
    plain = opened(folder, 1, tmp_path / "n1").checkpoint.tensors.keys()
    edit(folder, lambda t: [t.update({prefix + n: t.pop(n)}) for n in [*t] if n[:4] == "mtp."])
    assert opened(folder, 1, tmp_path / "n1").checkpoint.tensors.keys() == plain


@pytest.mark.parametrize("model", ["deepseek", "qwen3.5"])
def test_an_absent_file_of_the_head(model: str, smallest: Path, tmp_path: Path) -> None:
    """Without drafts it is not missed; with drafts a line says so; the trunk's files are needed."""
    folder = tmp_path / "model"
    if model == "deepseek":
        shutil.copytree(smallest, folder)
    else:
        save_family(folder, "qwen3.5", make_family("qwen3.5"))
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    prefix = "mtp." if model == "qwen3.5" else LAYER
    head = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    save_file({n: t for n, t in tensors.items() if n not in head}, folder / "a.safetensors")
    names = {n: "mtp.safetensors" if n in head else "a.safetensors" for n in tensors}
    index = {"weight_map": names, "metadata": {"total_size": 10**6}}
    (folder / INDEX).write_text(json.dumps(index))
    assert opened(folder, 0, tmp_path / "n0").config.num_nextn_predict_layers == 0
    with pytest.raises(CheckpointError, match=r"is missing.*: build with --nextn 0, or join"):
        opened(folder, 1, tmp_path / "n1")
    save_file(head, folder / "mtp.safetensors")
    assert opened(folder, 1, tmp_path / "n1").config.num_nextn_predict_layers == 1
    (folder / "a.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard a\.safetensors named by .* is missing"):
        opened(folder, 0, tmp_path / "n0")


@pytest.mark.parametrize("count", [0, 1])
def test_a_head_that_lies_beside_is_offered(count: int, trunk: Path, head: Path) -> None:
    """It is not used unasked, as it may be another one's; other files beside are not heads."""
    raw = json.loads((trunk / "config.json").read_text()) | {"num_nextn_predict_layers": count}
    (trunk / "config.json").write_text(json.dumps(raw))
    save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(1)}, trunk / "adapter.safetensors")
    flags = ("build", "--model", trunk, "--out", trunk / "out", *(("--nextn", "1") * count))
    assert "lies beside" not in refusal(*flags, code=2 - count)
    shutil.copy(head / "mtp.safetensors", place := trunk / "mtp.safetensors")
    line = refusal(*flags, code=2 - count)
    assert f"mtp.safetensors, which lies beside, has one: --mtp {place}" in line
    assert opened(trunk, 1, trunk / "out", mtp=place).config.num_nextn_predict_layers == 1


WRONG: dict[str, tuple[Callable[[Tensors], Any], dict[str, Any], str]] = {
    "hidden": (lambda t: None, {"hidden_size": 64}, "says hidden_size 64, the model's is 32: this"),
    "text": (lambda t: None, {"text_config": {"vocab_size": 5}}, "says vocab_size 5, the model's"),
    "vocabulary": (
        lambda t: t.update({f"{LAYER}shared_head.head.weight": torch.ones(7, 32)}),
        {},
        "has shape [7, 32], the model's vocabulary and hidden size make it [61, 32]: this head is",
    ),
    "trunk": (
        lambda t: [t.update({"model.layers.0.mlp.up_proj.weight": t.pop(n)}) for n in [*t]],
        {},
        "no tensor of MTP layer model.layers.1 is there",
    ),
    "format": (
        lambda t: None,
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        "weights quantised as bitsandbytes are not read",
    ),
}


@pytest.mark.parametrize("damage", WRONG)
def test_heads_of_other_models(damage: str, trunk: Path, head: Path, tmp_path: Path) -> None:
    change, config, says = WRONG[damage]
    edit(head, change, "mtp.safetensors")
    (head / "config.json").write_text(json.dumps(config))
    line = refusal("build", "--model", trunk, "--mtp", head, "--out", tmp_path / "out", code=1)
    assert line.startswith(f"--mtp {head}: ")
    assert says in line
    nothing = refusal("build", "--model", trunk, "--mtp", tmp_path / "no", code=1)
    assert nothing == f"--mtp {tmp_path / 'no'}: no such file or folder"
