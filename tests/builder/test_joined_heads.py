"""Engines of a trunk in one format and an MTP head in another, from another folder (--mtp)."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtpbuild.builder.compiler.plans import plan_engines
from mtpbuild.builder.compiler.refit import refit
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.program.engine_weights import EngineWeights
from mtpbuild.builder.weights.checkpoint import Checkpoint
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.runtime.contract.manifest import WEIGHTS, check_files, hash_file, read_manifest
from tests.support.families import make_config, make_family
from tests.support.gguf_files import converted, usual, write_gguf
from tests.support.invoke import invoke
from tests.support.numbers import played
from tests.support.requests import build, build_request

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
QWEN: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "tie_word_embeddings": False,
    "num_hidden_layers": 2, "full_attention_interval": 2,
}  # fmt: skip
PROMPTS = [[5, 17, 3], [40, 2, 9]]
Tensors = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def save(folder: Path, config: Any, tensors: Tensors, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    return folder


def stored(checkpoint: Checkpoint) -> Tensors:
    return {name: checkpoint.tensor(name) for name in checkpoint.tensors}


def gguf_trunk(place: Path, head: Tensors | None = None) -> tuple[Path, Path, Path]:
    """Write a Q8_0 trunk, a bf16 head, and both in one safetensors folder."""
    c, model = make_config("qwen3.5", **QWEN), make_family("qwen3.5", **QWEN).state_dict()
    head = head or {n: t.bfloat16() for n, t in model.items() if n.startswith("mtp.")}
    names = {name for name in model if not name.startswith("mtp.")}
    alone = c | {"mtp_num_hidden_layers": 0}
    tensors = dict(converted(alone, names, lambda name: model[name].float().numpy()))
    trunk = write_gguf(place / "trunk.gguf", alone, tensors, usual(Type.Q8_0))
    folder = find_model(str(trunk)).folder
    raw = json.loads((folder / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    raw["quantization_config"] = {"quant_method": "mtpbuild", "fmt": "int8", "block_size": 32}
    one = save(place / "one", raw, stored(open_checkpoint(folder)) | head)
    return trunk, save(place / "head", {}, head, "mtp.safetensors"), one


def awq_trunk(place: Path) -> tuple[Path, Path, Path]:
    """Write AutoAWQ's trunk, a bf16 head, and both in one folder."""
    source, config = DATA / "autoawq", json.loads((DATA / "autoawq/config.json").read_text())
    own, checkpoint = f"model.layers.{config['num_hidden_layers']}.", open_checkpoint(source)
    tensors = load_file(source / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(own)}
    names = [n for n in checkpoint.tensors if n.startswith(own) and "weight_" not in n]
    head = {name: checkpoint.read(name).bfloat16() for name in names}
    trunk = save(place / "trunk", config, rest)
    one = save(place / "one", config, rest | head)
    return trunk, save(place / "head", {}, head, "mtp.safetensors"), one


Make = Callable[[Path], tuple[Path, Path, Path]]
TRUNKS: list[Make] = [gguf_trunk, awq_trunk]


def weights_of(model: Path, mtp: Path | None, place: Path, weights: str | None = None) -> str:
    """Return the hash of the weights that a build would write."""
    request = build_request(model, (1,), out=place / "e", mtp=mtp, weights=weights)
    opened = plan_engines(request).open_model()
    assert opened.config.num_nextn_predict_layers == 1
    (place / "w").mkdir(parents=True)
    return EngineWeights(opened).write(place / "w", siblings=None).sha256


@pytest.mark.parametrize("make", TRUNKS)
@pytest.mark.parametrize("weights", ["int8", None])
def test_weights_are_those_of_one_folder(make: Make, weights: str | None, tmp_path: Path) -> None:
    trunk, head, one = make(tmp_path)
    joined = weights_of(trunk, head, tmp_path / "joined", weights)
    assert joined == weights_of(one, None, tmp_path / "whole", weights)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("make", TRUNKS)
def test_refit(make: Make, tmp_path: Path) -> None:
    """Another head, or one folder with both; without any head it is refused in a line."""
    trunk, head, one = make(tmp_path)
    other = {n: 2 * tensor for n, tensor in load_file(head / "mtp.safetensors").items()}
    save(tmp_path / "other", {}, other, "mtp.safetensors")
    engine = build(build_request(trunk, (1,), out=tmp_path / "engine", mtp=head))[0].folder
    before = hash_file(engine / WEIGHTS)
    code, _, err = invoke(
        "refit", "--engine", engine, "--checkpoint", trunk, "--mtp", tmp_path / "other"
    )
    assert (code, err) == (0, "")
    after = hash_file(engine / WEIGHTS)
    assert after == weights_of(trunk, tmp_path / "other", tmp_path / "anew") != before
    check_files(engine, read_manifest(engine), verify_hashes=True)
    refit(engine, str(one))
    assert hash_file(engine / WEIGHTS) == before
    code, _, line = invoke("refit", "--engine", engine, "--checkpoint", trunk)
    assert (code > 0, line.count("\n")) == (True, 1)
    assert "--mtp FILE_OR_FOLDER" in line
    assert hash_file(engine / WEIGHTS) == before


@pytest.mark.full
@pytest.mark.parametrize("make", TRUNKS)
def test_engines(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are those of one folder; drafts are accepted, and `verify` passes."""
    monkeypatch.chdir(tmp_path)  # where `verify` builds what it compares with
    trunk, head, one = make(tmp_path)
    texts, engines = list[Any](), [tmp_path / "joined", tmp_path / "whole"]
    for out, model, mtp in zip(engines, (trunk, one), (head, None), strict=True):
        build(build_request(model, (1,), out=out, mtp=mtp, portable=True, max_seq_len=96))
        output = played(out, PROMPTS, 40)
        texts.append([(answer.token_ids, answer.drafting) for answer in output])
    assert texts[0] == texts[1]
    assert sum(drafting.num_accepted_draft_tokens for _, drafting in texts[0]) > 0
    lines = [json.dumps({"input_ids": tokens}) for tokens in PROMPTS]
    (prompts := tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    flags = ("--model", trunk, "--prompts", prompts, "--seeds", 20)
    code, told, err = invoke("verify", "--engine", engines[0], *flags)
    assert code == 0, told + err
    for check in ("greedy text is that of nextn 0", "greedy text is the plain model's"):
        assert re.search(rf"{check} +passed", told), told


OTHERS: dict[str, tuple[Callable[[Tensors], Any], dict[str, Any], str]] = {
    "hidden size in settings": (lambda t: None, {"hidden_size": 128}, "says hidden_size 128, the"),
    "vocabulary": (
        lambda t: t.update({"lm_head.weight": torch.ones(7, 64)}), {}, "has shape [7, 64], the mo",
    ),
    "hidden size": (
        lambda t: t.update({n: torch.ones(3 * t[n].shape[0], *t[n].shape[1:]) for n in t}),
        {},
        "has shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("make", TRUNKS)
def test_heads_of_other_models(make: Make, what: str, tmp_path: Path) -> None:
    """They end in one line that names the head, before anything is built."""
    trunk, head, _ = make(tmp_path)
    change, config, says = OTHERS[what]
    tensors = load_file(head / "mtp.safetensors")
    change(tensors)
    save(head, config, tensors, "mtp.safetensors")
    flags = ("--mtp", head, "--nextn", 1, "--out", tmp_path / "out")
    code, told, line = invoke("build", "--model", trunk, *flags)
    assert (code > 0, told, line.count("\n")) == (True, "", 1)
    assert says in line
    assert str(head) in line
