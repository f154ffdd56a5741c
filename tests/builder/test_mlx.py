"""Checkpoints that MLX wrote are read to the bit, and answer as MLX's own models do."""

import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtpbuild.builder.checkpoint.readable import (
    name_stored_format,
    read_quantisation,
    refuse_quantised,
)
from mtpbuild.builder.checkpoint.shards import SINGLE
from mtpbuild.builder.formats import find_stored_format, name_own
from mtpbuild.builder.formats.format import make_entry
from mtpbuild.builder.formats.integers import SHIFTED
from mtpbuild.builder.formats.nvfp4 import NVFP4
from mtpbuild.builder.models import load_config
from mtpbuild.builder.weights.checkpoint import Checkpoint
from mtpbuild.builder.weights.files import collect_tensors, list_entries, open_checkpoint
from mtpbuild.builder.weights.head import open_slice
from mtpbuild.lab.verify.plain import load_plain
from mtpbuild.runtime.errors import CheckpointError
from tests.support.engines import greedy_ids
from tests.support.fake_target import greedy_only
from tests.support.other_formats import WRITTEN, digest
from tests.support.requests import build, build_request

TRUNKS = ["mlx_deepseek", "mlx_glm", "mlx_qwen"]
HEADS = {"mlx_glm": "mlx_glm_head", "mlx_qwen": "mlx_qwen_head"}
PROMPT = [5, 17, 3, 40, 2, 33, 7, 11]
FORMATS = {
    "mlx_deepseek": {f"mlx int{bits}" for bits in (2, 3, 4, 5, 6, 8)},
    "mlx_glm": {"mlx int8", "mlx mxfp4", "mlx mxfp8"},
    "mlx_qwen": {"mlx int8", "mlx nvfp4"},
    "mlx_glm_head": {"mlx int4"},
}


def as_stored(checkpoint: Checkpoint, path: str) -> Tensor:
    """Read the weight of one of MLX's modules, which may hold all experts or heads."""
    path = path.removeprefix("language_model.")
    at, _, leaf = path.rpartition(".")
    if leaf in ("embed_q", "unembed_out"):
        heads = checkpoint.read(f"{at}.kv_b_proj.weight").unflatten(0, (2, -1))
        return heads[:, :32].mT if leaf == "embed_q" else heads[:, 32:]
    if not at.endswith(".switch_mlp"):
        return checkpoint.read(f"{path}.weight")
    names = (f"{at.removesuffix('switch_mlp')}experts.{e}.{leaf}.weight" for e in range(4))
    return torch.stack([checkpoint.read(name) for name in names])


@pytest.mark.parametrize("folder", FORMATS)
def test_the_packages_values(folder: str) -> None:
    """Each weight equals, to the bit, what MLX dequantises."""
    checkpoint = open_checkpoint(WRITTEN / folder)
    meant = json.loads((WRITTEN / folder / "dequantised.json").read_text())
    wrong = [path for path in meant if digest(as_stored(checkpoint, path)) != meant[path]]
    assert not wrong
    weights = (name for name in checkpoint.tensors if name.endswith(".weight"))
    formats = filter(None, map(checkpoint.format, weights))
    assert {format.name for format in formats} == FORMATS[folder]


@pytest.mark.parametrize("folder", TRUNKS)
def test_the_packages_answers(folder: str) -> None:
    """Logits are MLX's: norms, convolutions, experts and heads are as they were."""
    place = WRITTEN / folder
    plain = load_plain(place)
    with torch.no_grad():
        found = plain.logits(plain.main(torch.tensor([PROMPT])))[0]
    wanted = torch.tensor(json.loads((place / "logits.json").read_text()))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-4)


def test_qwens_norms() -> None:
    """MLX stores factors, but for the delta rule's; a head with the prefix is as published."""
    tensors = load_file(WRITTEN / "mlx_qwen" / SINGLE)
    stored = {name.removeprefix("language_model."): each for name, each in tensors.items()}
    checkpoint = open_checkpoint(WRITTEN / "mlx_qwen")
    norms = [name for name in stored if "norm" in name]
    assert len(norms) == 8
    for name in norms:
        same = torch.equal(checkpoint.read(name), stored[name].float())
        assert same == ("linear_attn.norm" in name)
    last = "model.norm.weight"
    assert torch.equal(checkpoint.read(last), stored[last].float() - 1)


def join(trunk: str, head: Path) -> Checkpoint:
    return open_slice(WRITTEN / trunk, None, head)


@pytest.mark.parametrize("trunk", HEADS)
def test_a_head_is_whole(trunk: str) -> None:
    config = replace(load_config(WRITTEN / trunk), num_nextn_predict_layers=1)
    joined = join(trunk, WRITTEN / HEADS[trunk])
    assert joined.joined
    joined.check(joined.settle(config, drafts=True))


def test_names_of_heads() -> None:
    """GLM's flat names, and Qwen's norms, which hold factors."""
    glm = join("mlx_glm", WRITTEN / "mlx_glm_head")
    tensors = load_file(WRITTEN / "mlx_glm_head" / SINGLE)
    for name, ours in (("model.enorm", "enorm"), ("model.shared_head_norm", "shared_head.norm")):
        read = glm.read(f"model.layers.2.{ours}.weight")
        assert torch.equal(read, tensors[f"{name}.weight"].float())
    qwen = join("mlx_qwen", WRITTEN / "mlx_qwen_head")
    tensors = load_file(WRITTEN / "mlx_qwen_head" / SINGLE)
    for name in ("norm", "layers.0.self_attn.q_norm", "pre_fc_norm_hidden"):
        read = qwen.read(f"mtp.{name}.weight")
        assert torch.equal(read, tensors[f"{name}.weight"].float() - 1)


def test_a_head_with_the_prefix(tmp_path: Path) -> None:
    """Such tensors are mostly as they were published; here their norms' means are those of factors.

    Where values can't be read yet, the names decide.
    """
    folder = shutil.copytree(WRITTEN / "mlx_qwen_head", tmp_path / "head")
    tensors = load_file(folder / SINGLE)
    save_file({f"mtp.{name}": tensor for name, tensor in tensors.items()}, folder / SINGLE)
    joined = join("mlx_qwen", folder)
    assert torch.equal(joined.read("mtp.norm.weight"), tensors["norm.weight"].float() - 1)
    entries = list_entries(folder / SINGLE)
    (folder / SINGLE).unlink()
    assert collect_tensors(folder, [entries]).tensors["mtp.norm.weight"].source is None


NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
# Means of a head's norms as they are published; factors before `fc` are below 0.5.
MEANS = {**{f"layers.0.{name}": 0.05 for name in NORMS}, "norm": 0.05}
MEANS |= {"pre_fc_norm_embedding": -0.73, "pre_fc_norm_hidden": -0.51}


@pytest.mark.parametrize("trunk", ["converted", "as published", "elsewhere"])
@pytest.mark.parametrize("added", [(), [*MEANS], [*MEANS][:5], ["norm"]], ids=len)
def test_norms_of_a_head_are_told_by_their_means(
    trunk: str, added: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tools add 1 to all of them, to some or to none, whatever they do to the trunk's."""
    torch.manual_seed(0)
    prefix, source = "mtp.", WRITTEN / "mlx_qwen"
    if trunk == "elsewhere":
        prefix, source = "", WRITTEN / "mlx_qwen_head"
    tensors = {prefix + n: t for n, t in load_file(WRITTEN / "mlx_qwen_head" / SINGLE).items()}
    stored = {prefix + f"{name}.weight": (name in added, mean) for name, mean in MEANS.items()}
    drawn = {n: m + 0.1 * torch.randn(tensors[n].shape) for n, (_, m) in stored.items()}
    tensors |= {name: norm + stored[name][0] for name, norm in drawn.items()}
    own = {} if trunk == "elsewhere" else load_file(source / SINGLE)
    if trunk == "as published":
        turned = {n: t.swapaxes(1, 2).contiguous() for n, t in own.items() if "conv1d" in n}
        factors = {n: t - 1 for n, t in own.items() if "norm" in n and "linear_attn" not in n}
        own |= turned | factors
    folder = shutil.copytree(source, tmp_path / "a")
    save_file(own | tensors, folder / SINGLE)
    checkpoint = open_checkpoint(folder) if own else join("mlx_qwen", folder)
    last = "model.norm.weight"
    drawn[last] = open_checkpoint(WRITTEN / "mlx_qwen").read(last)
    for name, norm in drawn.items():
        read = checkpoint.read(name if own or name == last else f"mtp.{name}")
        assert torch.allclose(read, norm, atol=1e-3), name
    unusual = len(added) if trunk == "as published" else len(MEANS) - len(added)
    notes = [record.getMessage() for record in caplog.records]
    assert len(notes) == bool(unusual)
    assert all(f"added 1 to {unusual} norms of the MTP head" in note for note in notes)


def dequantised(folder: str, place: Path) -> Path:
    """Write the same checkpoint, and its head, in fp32 under the published names."""
    config = json.loads((WRITTEN / folder / "config.json").read_text())
    head = WRITTEN / HEADS[folder] if folder in HEADS else None
    joined = open_slice(WRITTEN / folder, None, head)
    parts = re.compile(r".*weight_(scales|biases|global_scale)")
    names = [name for name in joined.tensors if not parts.fullmatch(name)]
    place.mkdir()
    for key in ("quantization", "quantization_config"):
        del config[key]
    (place / "config.json").write_text(json.dumps(config))
    save_file({name: joined.read(name).contiguous() for name in names}, place / SINGLE)
    return place


@pytest.mark.full
@pytest.mark.parametrize("folder", TRUNKS)
def test_an_engines_tokens(folder: str, tmp_path: Path) -> None:
    """A portable engine, in fp32, of each architecture: the dequantised checkpoint's tokens."""
    count, texts = int(folder in HEADS), []
    mtp = {"mtp": WRITTEN / HEADS[folder]} if count else {}
    plain = dequantised(folder, tmp_path / "plain")
    for model, more in ((WRITTEN / folder, mtp), (plain, {})):
        out = tmp_path / f"{model.name}.engine"
        with greedy_only():
            build(build_request(model, (count,), out=out, portable=True, **more))
        texts.append(greedy_ids(out, [[5, 17, 3], [40, 2]], 12))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("settings", "held", "says"),
    [
        ({"bits": 4, "group_size": 64}, "int4", None),
        ({"bits": 7, "group_size": 64}, "int8", "mlx with 7 bits are not read"),
        ({"bits": 4, "group_size": 64, "mode": "log"}, "int8", "mlx log are not read"),
        ({"bits": 4, "group_size": 64, "lm_head": {"bits": 1}}, "int4", "with 1 bits are not read"),
        ({"bits": 4, "group_size": 64, "lm_head": False}, "int4", None),
    ],
)
def test_settings(settings: dict[str, Any], held: str, says: str | None, tmp_path: Path) -> None:
    """The key `quantization` is MLX's; it wins over what was left of another format."""
    left = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    both = {"quantization": settings, "quantization_config": left}
    (tmp_path / "config.json").write_text(json.dumps(both))
    assert read_quantisation(tmp_path)["quant_method"] == "mlx"
    assert name_stored_format(read_quantisation(tmp_path), "x.weight") == held
    refuses = pytest.raises(CheckpointError, match=says) if says else nullcontext()
    with refuses:
        refuse_quantised(tmp_path, tmp_path)


def test_settings_of_modules() -> None:
    up, down = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.experts.3.down_proj"
    stack = "language_model.model.layers.0.mlp.switch_mlp.down_proj"
    own = {up: {"bits": 8}, stack: {"bits": 4, "mode": "nvfp4"}, "lm_head": False}
    settings = {"quant_method": "mlx", "bits": 4, "group_size": 64, **own}
    found = [name_stored_format(settings, f"{n}.weight") for n in (up, down, "lm_head", "other")]
    assert found == ["int8", "nvfp4", "bf16", "int4"]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("place", ["default", "module", "inside"])
def test_a_stream_of_bits(bits: int, group: int, place: str) -> None:
    """Codes follow each other without spare bits; settings tell bits and group."""
    torch.manual_seed(bits)
    codes = torch.randint(0, 2**bits, (3, 128))
    shift = torch.arange(bits)
    stream = (codes[..., None] >> shift & 1).flatten(1).unflatten(1, (-1, 8))
    packed = (stream << torch.arange(8)).sum(-1).to(torch.uint8).view(torch.uint32)
    scales, biases = torch.rand(2, 3, 128 // group).bfloat16()
    tensors = {"weight": packed, "scales": scales, "biases": biases}
    own = {name_own(f"a.{ending}"): tensor for ending, tensor in tensors.items()}
    one, other = {"bits": bits, "group_size": group}, {"bits": 4, "group_size": 8}
    rules: dict[str, Any] = {"default": one, "module": {"a": one}, "inside": {"b": one}}
    entries = {name: make_entry(tensor) for name, tensor in own.items()}
    format = find_stored_format("a.weight", entries, other | rules[place])
    assert format is not None
    assert (format.bits, format.block) == (bits, group)
    parts = {suffix: own[f"a.weight{suffix}"] for suffix in format.suffixes}
    assert format.parts((3, 128)) == {suffix: make_entry(part) for suffix, part in parts.items()}
    wide = (each.float().repeat_interleave(group, 1) for each in (scales, biases))
    scale, bias = wide
    assert torch.equal(format.decode(parts), codes * scale + bias)
    assert format.engine_format is SHIFTED[4 if bits <= 4 else 8]
    held = format.engine_format.decode(format.to_engine_format("a", parts))
    assert torch.equal(held.view(3, 128), format.decode(parts))


def test_nvfp4_stays() -> None:
    """Engines for GPUs hold its values and scales; without a global scale theirs is 1."""
    checkpoint = open_checkpoint(WRITTEN / "mlx_qwen")
    for module in ("mlp.experts.2.up_proj", "self_attn.q_proj"):
        name = f"model.layers.1.{module}.weight"
        format = checkpoint.format(name)
        assert format is not None
        assert format.engine_format is NVFP4
        parts = checkpoint.read_engine_parts(name)
        assert (parts["_scale_2"] == 1) == ("experts" not in name)
        decoded, near = checkpoint.read(name), 2.0**-22 if "experts" in name else 0
        torch.testing.assert_close(NVFP4.decode(parts), decoded, rtol=near, atol=0)
        held = {suffix: make_entry(part) for suffix, part in parts.items()}
        assert held == NVFP4.parts(tuple(decoded.shape))
