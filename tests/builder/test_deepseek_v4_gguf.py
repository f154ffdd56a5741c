"""GGUF files of DeepSeek-V4 are read as the checkpoints that they were made from."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from mtpbuild.builder.models import load_config
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.weights.files import list_entries, open_checkpoint
from mtpbuild.builder.weights.gguf_folder import find_lone_head
from mtpbuild.builder.weights.head import open_slice, read_head_config
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import WEIGHTS
from mtpbuild.runtime.errors import CheckpointError
from tests.support.deepseek_v4 import BLOCKS, save
from tests.support.deepseek_v4_gguf import write
from tests.support.families import make_family, save_family
from tests.support.gguf_files import dequantised
from tests.support.requests import build, build_request

EPS = 2**-17  # a file has it in fp32


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("yarn", [True, False])
def test_weights_and_configuration(yarn: bool, tmp_path: Path) -> None:
    """Of a trunk with its head beside it, to the bit."""
    stored = tmp_path / "stored"
    save(stored, native=True, heavy=128, yarn=yarn, rms_norm_eps=EPS, hc_eps=EPS, swiglu_limit=0.75)
    path = write(tmp_path / "a.gguf", stored)
    write(tmp_path / "mtp-a.gguf", stored, head=True)
    folder = find_model(str(path)).folder
    config = load_config(folder)
    assert config == load_config(stored)
    read, wanted = open_checkpoint(folder), open_checkpoint(stored)
    read.check(config)
    assert read.tensors.keys() == wanted.tensors.keys()
    for name in wanted.tensors:
        assert torch.equal(read.read(name), wanted.read(name).float()), name


SPELLING: dict[str, Any] = {"native": True, "heavy": 128, "rms_norm_eps": EPS, "hc_eps": EPS}


@pytest.mark.parametrize("head", ["mtp-a.gguf", "b/head.gguf", "stored"])
def test_a_dspark_head(head: str, tmp_path: Path) -> None:
    """It is its trunk's own, to the bit: beside a GGUF trunk, named, and in safetensors files."""
    stored, place = tmp_path / "stored", tmp_path / head
    save(stored, stages=2, swiglu_limit=0.75, **SPELLING)
    path = write(tmp_path / "a.gguf", stored)
    if place != stored:
        write(place, stored, stages=2)
    folder = find_model(str(path)).folder
    named = find_lone_head(folder) or place
    assert named == place
    config = read_head_config(named, folder, load_config(folder))
    assert config == load_config(stored)
    read, wanted = open_slice(folder, None, named), open_checkpoint(stored)
    read.check(config)
    assert wanted.tensors.keys() - read.tensors.keys() == {CONFIDENCES}
    for name in read.tensors:
        assert torch.equal(read.read(name), wanted.read(name).float()), name


CONFIDENCES = "mtp.1.confidence_head.proj.weight"  # which no step reads
OTHERS = {
    "swiglu_limit": "its trunk has swiglu_limit 0.5, the model 0.75",
    "sliding_window": "its trunk has sliding_window 16, the model 8",
    "vocab_size": "its trunk has vocab_size 64, the model 60",
}


@pytest.mark.parametrize(("key", "value"), [*zip(OTHERS, (0.5, 16, 64), strict=True)])
def test_a_dspark_head_of_another_model(key: str, value: Any, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"swiglu_limit": 0.75} | {key: value}
    save(tmp_path / "stored", swiglu_limit=0.75, **SPELLING)
    save(tmp_path / "other", stages=1, **SPELLING | sizes)
    head = write(tmp_path / "head.gguf", tmp_path / "other", stages=1)
    with pytest.raises(CheckpointError, match=OTHERS[key]):
        read_head_config(head, tmp_path / "stored", load_config(tmp_path / "stored"))
    folder = save_family(tmp_path / "qwen3", "qwen3", make_family("qwen3"))
    with pytest.raises(CheckpointError, match="of DeepSeek-V4, which the model is not"):
        read_head_config(head, folder, load_config(folder))


WIDE: dict[str, Any] = {  # rows are whole blocks of 256
    "hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 128, "q_lora_rank": 256,
    "o_lora_rank": 128, "index_head_dim": 32, "initializer_range": 0.05,
}  # fmt: skip
KEPT = {"MXFP4": "mxfp4", "Q8_0": "int8", "Q4_0": "int4", "Q4_K": "q4_k"}


def type_of(experts: str) -> Any:
    """Return the types of published files: experts in one, other products of FP8 in Q8_0.

    Whoever quantises them anew also rounds what the checkpoint has in floats.
    """
    floats = "bias|norm|base|scale|sink|tid2eid|ffn_gate_inp"

    def choose(name: str, value: Any) -> Type:
        if "_exps" in name:
            return Type[experts]
        return Type.F32 if re.search(floats, name) or value.shape[-1] % 32 else Type.Q8_0

    return choose


@pytest.mark.parametrize("kind", KEPT)
def test_quantised_files(kind: str, tmp_path: Path) -> None:
    sizes = WIDE if kind == "Q4_K" else BLOCKS
    stored, E = tmp_path / "stored", sizes["hidden_size"]
    save(stored, native=True, heavy=128, **sizes)
    path = write(tmp_path / "a.gguf", stored, type_of=type_of(kind))
    head = write(tmp_path / "mtp-a.gguf", stored, head=True, type_of=type_of(kind))
    folder = find_model(str(path)).folder
    read = open_checkpoint(folder)
    read.check(read.settle(load_config(folder)))
    values, module = dequantised(path), dequantised(head)
    layer, own = "model.layers.1", "mtp.0"
    joint = module["blk.4.nextn.eh_proj.weight"]
    wanted = {
        f"{own}.e_proj.weight": joint[:, :E],
        f"{own}.h_proj.weight": joint[:, E:],
        f"{own}.hc_head.hc_fn": module["output_hc_fn.weight"],
        "model.hc_head.hc_fn": values["output_hc_fn.weight"],
        f"{layer}.attn_hc.fn": values["blk.1.hc_attn_fn.weight"],
        f"{layer}.self_attn.q_b_proj.weight": values["blk.1.attn_q_b.weight"],
        f"{layer}.self_attn.compressor.position_bias": values["blk.1.attn_compressor_ape.weight"],
        f"{layer}.mlp.experts.3.down_proj.weight": values["blk.1.ffn_down_exps.weight"][3],
        f"{own}.mlp.experts.5.gate_proj.weight": module["blk.4.ffn_gate_exps.weight"][5],
    }
    for name, value in wanted.items():
        assert torch.equal(read.read(name), torch.from_numpy(value)), name
        floats = name.endswith(("fn", "bias"))
        format, kept = read.format(name), KEPT[kind] if ".experts." in name else "int8"
        assert (format and format.name) == (None if floats else kept), name


@pytest.mark.full
@pytest.mark.parametrize("stages", [0, 2])
def test_engines(stages: int, tmp_path: Path) -> None:
    """They hold experts in FP4 and other products in int8; drafts change no text."""
    save(tmp_path / "stored", native=True, heavy=128, stages=stages, **BLOCKS)
    path = write(tmp_path / "a.gguf", tmp_path / "stored", type_of=type_of("MXFP4"))
    head: dict[str, Any] = {"stages": stages, "head": not stages, "type_of": type_of("MXFP4")}
    write(tmp_path / "mtp-a.gguf", tmp_path / "stored", **head)
    settings = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    built, texts = build(build_request(path, (0, 3), out=tmp_path / "e", max_seq_len=256)), []
    entries = list_entries(built[0].folder / WEIGHTS)
    bits = {e.name: e.shape[-1] // 128 for e in entries if e.name.endswith("_proj.values")}
    assert {size for name, size in bits.items() if ".mlp.gate_up" in name} == {4}
    assert {size for name, size in bits.items() if name.endswith("q_b_proj.values")} == {8}
    for one in built:
        with Engine.load(one.folder, threads=1) as engine:
            texts.append(engine.generate([7, 8, 9], settings).token_ids)
    assert texts[0] == texts[1]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"expert_gating_func": 2}, "expert_gating_func 2 is not 4"),
    ({"swiglu_clamp_exp": [0.5] * 5}, "layers clamp experts at 2 limits"),
    ({"attention.compress_ratios": 4}, "attention.compress_ratios must be a list, not 4"),
    ({"embedding_length": 128}, "blk.4.nextn.eh_proj.weight can't have shape [64, 128]"),
]


@pytest.mark.parametrize(("keys", "message"), WRONG)
def test_wrong_files(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(tmp_path / "stored", native=True, heavy=128, **BLOCKS)
    path = write(tmp_path / "a.gguf", tmp_path / "stored", keys=keys)
    write(tmp_path / "mtp-a.gguf", tmp_path / "stored", head=True, keys=keys)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(find_model(str(path)).folder)
    assert str(caught.value).endswith(message)
