"""`mtpbuild quantize`: what it writes, that it is read again, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtpbuild.builder.checkpoint.readable import MODELOPT
from mtpbuild.builder.checkpoint.shards import INDEX, SINGLE
from mtpbuild.builder.compiler import quantize
from mtpbuild.builder.compiler.quantize import Quantized, QuantizeRequest
from mtpbuild.builder.formats import FORMATS
from mtpbuild.builder.models.common.weight import WHOLE, convert_weights, join_slices
from mtpbuild.builder.models.deepseek_v3.weights import weight_table
from mtpbuild.builder.weights import placed
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.builder.weights.quantised_view import format_by
from mtpbuild.builder.weights.scheme import NVFP4_V2, SCHEMES, Scheme, make_scheme
from mtpbuild.runtime.errors import CheckpointError, UsageError
from tests.support.checkpoints import QUANTIZABLE, load_config, made_of, random_checkpoint
from tests.support.invoke import invoke
from tests.support.requests import quantize as quantize_by

Q_A = "model.layers.0.self_attn.q_a_proj.weight"
EXPERT = "model.layers.1.mlp.experts.3.gate_proj.weight"
MTP_EXPERT = "model.layers.2.mlp.experts.3.gate_proj.weight"
E4M3 = torch.float8_e4m3fn
EXACT = ("norm.weight", "gate.weight", "bias", "eh_proj.weight", "embed_tokens.weight")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = random_checkpoint(tmp_path_factory.mktemp("source") / "model", **QUANTIZABLE)
    tensors = load_file(folder / SINGLE)
    tensors = {k: t if k.endswith("bias") else t.bfloat16() for k, t in tensors.items()}
    for name, of in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        tensors[f"model.layers.2.{name}.weight"] = tensors[f"{of}.weight"].clone()
    save_file(tensors, folder / SINGLE)
    return folder


def run(source: Path, out: Path, scheme: Scheme, force: bool = False) -> Quantized:
    return quantize_by(QuantizeRequest(str(source), scheme, out, force=force))


def read(folder: Path) -> dict[str, Tensor]:
    """Every weight of the program, through the checks."""
    checkpoint = open_checkpoint(folder)
    table = checkpoint.check(checkpoint.settle(load_config(folder)))
    return dict(join_slices(convert_weights(checkpoint, table)))


def formats_of(folder: Path) -> dict[str, str]:
    checkpoint = open_checkpoint(folder)
    names = {s.name for w in weight_table(load_config(folder), WHOLE) for s in w.stored}
    found = {name: checkpoint.format(name) for name in names}
    return {name: format.name for name, format in found.items() if format is not None}


LATENTS = ("q_a_proj", "kv_a_proj_with_mqa")


@pytest.mark.parametrize("name", sorted(FORMATS.keys() & SCHEMES.keys()))
def test_what_is_written_is_read(name: str, source: Path, tmp_path: Path) -> None:
    """Each program's weight is the table's transform of the decoded parts, and near the source."""
    done = run(source, tmp_path / "out", SCHEMES[name])
    assert done.unfit == []
    weights, plain = read(tmp_path / "out"), read(source)
    stored = load_file(tmp_path / "out" / SINGLE)
    for weight in weight_table(load_config(source), WHOLE):
        tensors = {}
        for part in weight.stored:
            format = format_by(SCHEMES[name], load_config(source), part)
            if format is None:
                tensors[part.name] = stored[part.name].float()
                continue
            parts = {suffix: stored[part.name + suffix] for suffix in format.parts(part.shape)}
            tensors[part.name] = format.decode(parts)
        assert torch.equal(weights[weight.name], made_of(weight, tensors)), weight.name
    errors = {n: (w - plain[n]).norm() / plain[n].norm() for n, w in weights.items()}
    limit = {"fp8": 0.03, "nvfp4": 0.12, "int8": 0.01, "int4": 0.1}[name]
    assert max(errors.values()) < limit
    assert all(errors[n] == 0 for n in weights if n.endswith(EXACT) or n in EXACT)
    found, portion = [*formats_of(tmp_path / "out").values()], done.portions[name]
    assert (portion.weights, 0 < portion.loss.relative < limit) == (found.count(name), True)
    size = sum(each.bytes for each in done.portions.values())
    assert size == sum(tensor.nbytes for tensor in stored.values())


def test_which_weights(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "fp8", SCHEMES["fp8"])
    found = formats_of(tmp_path / "fp8")
    assert len(found) == 3 * 5 + 3 + 2 * 9 * 3  # attentions, a dense MLP, experts
    assert set(found.values()) == {"fp8"}
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]

    run(source, tmp_path / "nvfp4", SCHEMES["nvfp4"])
    found = formats_of(tmp_path / "nvfp4")
    assert len(found) == 3 + 9 * 3
    assert not any("self_attn" in name or "layers.2" in name for name in found)
    config = json.loads((tmp_path / "nvfp4" / MODELOPT).read_text())["quantization"]
    excluded = ["lm_head", "model.layers.*.self_attn*", "model.layers.2*"]
    assert (config["quant_algo"], config["exclude_modules"]) == ("NVFP4", excluded)

    run(source, tmp_path / "v2", SCHEMES["nvfp4-v2"])
    more = set(formats_of(tmp_path / "v2")) - set(found)
    assert more == {f"model.layers.{i}.self_attn.o_proj.weight" for i in (0, 1)}

    run(source, tmp_path / "int4", SCHEMES["int4"])
    found = formats_of(tmp_path / "int4")
    assert not any("kv_b_proj" in name for name in found)
    latents = {f"model.layers.{i}.self_attn.{n}.weight" for i in range(3) for n in LATENTS}
    assert {name for name, format in found.items() if format == "int8"} == latents


def test_modules_in_another_precision(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "a", Scheme(None, "nvfp4"))
    found = formats_of(tmp_path / "a")
    assert set(found.values()) == {"nvfp4"}
    assert all(name.startswith("model.layers.2.mlp.") for name in found)
    assert not (tmp_path / "a" / MODELOPT).exists()
    run(source, tmp_path / "b", Scheme("nvfp4", "fp8"))
    found = formats_of(tmp_path / "b")
    assert (found[EXPERT], found[MTP_EXPERT]) == ("nvfp4", "fp8")
    read(tmp_path / "b")


def test_embedding_and_head(source: Path, tmp_path: Path) -> None:
    """On request they are in int8, and so are the modules' copies of them."""
    run(source, tmp_path / "out", make_scheme("int4", None, None, head="int8"))
    found = formats_of(tmp_path / "out")
    ends = {"model.embed_tokens.weight": "int8", "lm_head.weight": "int8"}
    assert ends.items() <= found.items()
    fine = {name for name in found if any(part in name for part in LATENTS)} | ends.keys()
    assert {name for name, format in found.items() if format == "int8"} == fine
    assert {found[name] for name in found.keys() - fine} == {"int4"}
    stored = load_file(tmp_path / "out" / SINGLE)
    for copy, name in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        for part in ("weight", "weight_scale"):
            assert torch.equal(stored[f"model.layers.2.{copy}.{part}"], stored[f"{name}.{part}"])
    weights, plain = read(tmp_path / "out"), read(source)
    assert 0 < (weights["lm_head"] - plain["lm_head"]).norm() / plain["lm_head"].norm() < 0.01
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["head"] == "int8"
    stored["model.layers.2.shared_head.head.weight"][0, 0, 0] ^= 1
    save_file(stored, tmp_path / "out" / SINGLE)
    assert "mtp.0.lm_head" not in weights
    assert "mtp.0.lm_head" in read(tmp_path / "out")


def test_copies_of_a_quantised_head_are_quantised_anew(source: Path, tmp_path: Path) -> None:
    """Their stored shapes are those of blocks; what is written has the weights' own."""
    run(source, tmp_path / "first", make_scheme("int4", None, None, head="int8"))
    wanted = read(tmp_path / "first")["lm_head"]
    for name, head in (("plain", None), ("again", "int8")):
        run(tmp_path / "first", tmp_path / name, make_scheme("fp8", None, None, head=head))
        found = read(tmp_path / name)
        assert "mtp.0.lm_head" not in found
        assert (found["lm_head"] - wanted).norm() < 0.01 * wanted.norm()


def test_gate_and_up_share_their_second_scale(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", SCHEMES["nvfp4"])
    stored = load_file(tmp_path / "out" / SINGLE)
    gate, up = stored[f"{EXPERT}_scale_2"], stored[f"{EXPERT}_scale_2".replace("gate_", "up_")]
    plain = load_file(source / SINGLE)
    both = torch.cat([plain[EXPERT], plain[EXPERT.replace("gate_", "up_")]]).float()
    assert gate == up == both.abs().max() / 2688


def test_a_quantised_checkpoint_is_a_source(source: Path, tmp_path: Path) -> None:
    """FP8 -> NVFP4 as ModelOpt does with DeepSeek's: what stays unquantised becomes bf16."""
    run(source, tmp_path / "fp8", SCHEMES["fp8"])
    run(tmp_path / "fp8", tmp_path / "nvfp4", SCHEMES["nvfp4"])
    found = formats_of(tmp_path / "nvfp4")
    assert set(found.values()) == {"nvfp4"}
    assert open_checkpoint(tmp_path / "nvfp4").tensors[Q_A].dtype == "BF16"
    decoded = open_checkpoint(tmp_path / "fp8").read(Q_A)
    assert torch.equal(load_file(tmp_path / "nvfp4" / SINGLE)[Q_A], decoded.bfloat16())
    assert "quantization_config" not in json.loads((tmp_path / "nvfp4" / "config.json").read_text())


def test_shards(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(source, tmp_path / "one", SCHEMES["nvfp4"])
    split = placed.split_into_shards
    monkeypatch.setattr(quantize, "split_into_shards", lambda parts: split(parts, 100_000))
    run(source, tmp_path / "many", SCHEMES["nvfp4"])
    shards = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    stored = load_file(tmp_path / "one" / SINGLE)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    one, many = read(tmp_path / "one"), read(tmp_path / "many")
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_weights_that_no_block_fits(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path / "model", num_hidden_layers=1, num_nextn_predict_layers=0)
    code, out, err = invoke("quantize", "--model", folder, "--to", "nvfp4", "--out", tmp_path / "q")
    assert (code, err) == (0, "")
    assert "nvfp4" in out
    done = run(folder, tmp_path / "int4", SCHEMES["int4"])
    assert done.unfit == [
        "model.layers.0.self_attn.q_b_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    ]
    assert not set(done.unfit) & set(formats_of(tmp_path / "int4"))


def spoiled(source: Path, folder: Path, name: str, tensor: Tensor | None) -> str:
    """Why a quantised checkpoint with one tensor changed (None: removed) is refused."""
    run(source, folder, SCHEMES["fp8" if "_inv" in name else "nvfp4"])
    tensors = load_file(folder / SINGLE)
    if tensor is None:
        tensors.pop(name)
    else:
        tensors[name] = tensor
    save_file(tensors, folder / SINGLE)
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{folder / SINGLE}: ").removeprefix(f"{folder}: ")


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        (f"{Q_A}_scale_inv", torch.ones(1, 1), "has shape [1, 1], fp8 of [32, 160] makes it [1, 2"),
        (f"{Q_A}_scale_inv", None, f"tensor {Q_A} is F8_E4M3; supported: BF16, F16, F32, fp8 with"),
        (f"{EXPERT}_scale_2", torch.tensor(torch.inf), "weight_scale_2 holds NaN or Inf"),
        (f"{EXPERT}_scale_2", torch.ones(1), "has shape [1], nvfp4 of [64, 160] makes it []"),
        (f"{EXPERT}_scale_2", None, f"missing tensor {EXPERT}_scale_2"),
        (f"{EXPERT}_scale", None, f"tensor {EXPERT} is U8; supported: BF16"),
        (f"{EXPERT}_scale", torch.full((64, 10), torch.nan).to(E4M3), "weight_scale holds NaN"),
        (f"{Q_A}_scale", torch.ones(1), f"does not have: {Q_A}_scale"),
    ],
)
def test_bad_scales(
    name: str, tensor: Tensor | None, says: str, source: Path, tmp_path: Path
) -> None:
    assert says in spoiled(source, tmp_path / "bad", name, tensor)


def test_scales_for_activations_and_caches_are_not_needed(source: Path, tmp_path: Path) -> None:
    """ModelOpt's exports have them; weights here are dequantised and caches hold fp32."""
    run(source, tmp_path / "out", SCHEMES["nvfp4"])
    plain = read(tmp_path / "out")
    tensors = load_file(tmp_path / "out" / SINGLE)
    tensors[EXPERT.replace("weight", "input_scale")] = torch.tensor(0.01)
    for scale in ("k_proj.k_scale", "v_proj.v_scale"):
        tensors[f"model.layers.2.self_attn.{scale}"] = torch.tensor(1.0)
    save_file(tensors, tmp_path / "out" / SINGLE)
    assert all(torch.equal(w, plain[n]) for n, w in read(tmp_path / "out").items())


def test_the_flags(source: Path, tmp_path: Path) -> None:
    assert make_scheme("nvfp4", None, None) == SCHEMES["nvfp4"]
    assert make_scheme("nvfp4", None, NVFP4_V2) == SCHEMES["nvfp4-v2"]
    assert make_scheme("bf16", "int4", None) == Scheme(None, "int4")
    with pytest.raises(UsageError, match="--to fp9 is unknown; supported: bf16, fp8, nvfp4, int8"):
        make_scheme("fp9", None, None)
    with pytest.raises(UsageError, match="--to bf16 quantises nothing"):
        make_scheme("bf16", None, None, head="none")
    with pytest.raises(UsageError, match="--head int3 is unknown; supported: int8, int4, none"):
        make_scheme("int4", None, None, head="int3")
    assert make_scheme("int4", None, None, head="int4").head == "int4"
    assert make_scheme("bf16", None, None, head="int8") == Scheme(None, None, None, "int8")
    flags = ("quantize", "--model", source, "--to", "fp8", "--out")
    code, out, err = invoke(*flags, tmp_path / "new", "--exclude", "*.mlp.*")
    assert (code, err) == (0, "")
    assert f"wrote {tmp_path / 'new'}" in out
    assert all("self_attn" in name for name in formats_of(tmp_path / "new"))


def test_where_it_may_write(source: Path, tmp_path: Path) -> None:
    flags = ("quantize", "--model", source, "--to", "fp8", "--out")
    assert "is the source itself" in invoke(*flags, source, "--force")[2]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    code, out, err = invoke(*flags, tmp_path / "full", "--force")
    assert (code, out) == (1, "")
    assert f"{tmp_path / 'full'} exists and is not a checkpoint; choose another --out" in err
    run(source, tmp_path / "out", SCHEMES["fp8"])
    assert "holds a checkpoint; use --force to replace it" in invoke(*flags, tmp_path / "out")[2]
    run(source, tmp_path / "out", SCHEMES["nvfp4"], force=True)
    assert (tmp_path / "out" / MODELOPT).is_file()


def test_nothing_half_written(source: Path, tmp_path: Path) -> None:
    spoilt = tmp_path / "spoilt"
    run(source, spoilt, SCHEMES["fp8"])
    tensors = load_file(spoilt / SINGLE)
    tensors[EXPERT + "_scale_inv"][0, 0] = torch.nan
    save_file(tensors, spoilt / SINGLE)
    code, out, err = invoke("quantize", "--model", spoilt, "--to", "nvfp4", "--out", tmp_path / "q")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["spoilt"]
