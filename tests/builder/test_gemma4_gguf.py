"""GGUF files of Gemma-4 and its assistant are read as the checkpoints that they were made from."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers.trainers import BpeTrainer
from transformers.models.gemma.tokenization_gemma import GemmaTokenizer

from mtpbuild.builder.compiler.source import find_source
from mtpbuild.builder.gguf.choice import choose_head, list_models
from mtpbuild.builder.gguf.container import GgufFile
from mtpbuild.builder.gguf.tokenizer import make_tokenizer, tokenizer_files
from mtpbuild.builder.models import load_config
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.weights.files import list_entries, open_checkpoint
from mtpbuild.builder.weights.gguf_folder import list_splits
from mtpbuild.builder.weights.head import open_head, read_head_config
from mtpbuild.runtime.contract.manifest import WEIGHTS
from mtpbuild.runtime.errors import CheckpointError
from tests.support import model_tokenizers
from tests.support.gemma4 import SHAPES, make_assistant, make_trunk, save
from tests.support.gemma4_gguf import names, write_head, write_trunk
from tests.support.gguf_files import dequantised
from tests.support.requests import build, build_request

EPS = 2**-17  # a file has it in fp32
WIDE: dict[str, Any] = {  # rows are whole blocks of 32
    "hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "global_head_dim": 32,
}  # fmt: skip
WIDE_SHAPES: dict[str, dict[str, Any]] = {
    "dense": WIDE,
    "mixture": WIDE | {"moe_intermediate_size": 32},
    "small": WIDE | {"hidden_size_per_layer_input": 32},
}


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_and_configuration(shape: str, tmp_path: Path) -> None:
    trunk = make_trunk(shape, rms_norm_eps=EPS)
    folder = find_model(str(write_trunk(tmp_path / "a.gguf", trunk))).folder
    stored = save(trunk, tmp_path / "stored")
    config = load_config(folder)
    assert config == load_config(stored)
    read, wanted = open_checkpoint(folder), open_checkpoint(stored)
    read.check(config)
    assert read.tensors.keys() == wanted.tensors.keys()
    for name in wanted.tensors:
        assert torch.equal(read.read(name), wanted.read(name)), name


@pytest.mark.parametrize(
    ("shape", "kind"), [("dense", "Q4_0"), ("mixture", "Q8_0"), ("small", "Q4_0")]
)
def test_quantised_files(shape: str, kind: str, tmp_path: Path) -> None:
    trunk = make_trunk(shape, **WIDE_SHAPES[shape])
    path = write_trunk(tmp_path / "a.gguf", trunk, Type[kind])
    values = dequantised(path)
    for name, value in trunk.state_dict().items():
        if name != "lm_head.weight":
            value.copy_(torch.from_numpy(values[names.rename(name)]))
    wanted = open_checkpoint(save(trunk, tmp_path / "stored"))
    folder = find_model(str(path)).folder
    read = open_checkpoint(folder)
    read.check(read.settle(load_config(folder)))
    for name in wanted.tensors:
        assert torch.equal(read.read(name).float(), wanted.read(name)), name
    kept = {name.removesuffix("_scale") for name in read.tensors if name.endswith("weight_scale")}
    floats = {name for name in wanted.tensors if wanted.tensors[name].shape[1:]} - kept
    assert all(name.endswith("router.proj.weight") for name in floats)


@pytest.mark.parametrize("others", [False, True])
def test_an_assistant_is_the_one_that_it_was_made_from(others: bool, tmp_path: Path) -> None:
    folder = save(make_trunk("small", rms_norm_eps=EPS), tmp_path / "trunk")
    head = make_assistant("small", ordered=False, rms_norm_eps=EPS)
    file = write_head(tmp_path / "head.gguf", head, others=others)
    places, config = (save(head, tmp_path / "head"), file), load_config(folder)
    first, second = (read_head_config(place, folder, config) for place in places)
    assert first.head is not None
    # A head has no keys whose values could be the same; without groups their sizes mean nothing.
    free: dict[str, Any] = {
        "attention_k_eq_v": True,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
    }
    same: Any = replace(first.head, **free)
    assert replace(first, head=same) == second
    wanted, read = (open_head(place, config) for place in places)
    assert wanted.tensors.keys() == read.tensors.keys()
    for name in wanted.tensors:
        assert torch.equal(wanted.read(name), read.read(name)), name


@pytest.mark.parametrize("name", ["mtp-any.gguf", "MTP/any-Q8_0.gguf"])
def test_a_head_beside_the_trunk_is_taken(name: str, tmp_path: Path) -> None:
    path, head = write_trunk(tmp_path / "a.gguf", make_trunk("dense")), tmp_path / name
    write_head(head, make_assistant("dense"))
    source = find_source(build_request(path, (3,)))
    assert (source.mtp, source.config.head is None) == (head, False)
    assert open_head(head, source.config).tensors
    assert find_source(build_request(path, (0,))).config.head is None
    other = write_head(tmp_path / "other.gguf", make_assistant("dense"))
    assert find_source(build_request(path, (3,), mtp=other)).mtp == other


def test_files_in_a_folder_of_heads_are_no_models() -> None:
    names = ["q/a-Q8_0.gguf", "q/MTP/a-Q8_0.gguf", "MTP/b.gguf"]
    assert list_models(names) == {"q/a-Q8_0": ["q/a-Q8_0.gguf"]}
    assert choose_head(names[0], names) == ["q/MTP/a-Q8_0.gguf"]
    assert choose_head(names[0], [*names, "q/MTP/a-BF16.gguf"]) == []


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "pattern": (
        {"keys": {"attention.sliding_window_pattern": [True, False]}},
        "key gemma4.attention.sliding_window_pattern has 2 values for 5 layers",
    ),
    "numbers": (
        {"keys": {"attention.sliding_window_pattern": 6}},
        "attention.sliding_window_pattern must be a list of truth values",
    ),
    "heads": (
        {"keys": {"attention.head_count_kv": [2, 1, 1, 2, 1]}},
        "layers of one kind have [2, 1, 1, 2, 1] heads of keys",
    ),
    "MLPs": (
        {"keys": {"feed_forward_length": [40, 80, 40, 40, 40]}},
        "layers have MLPs of [40, 80, 40, 40, 40], which is not supported",
    ),
    "more shared layers than layers": (
        {"keys": {"feed_forward_length": [40] * 4 + [80], "attention.shared_kv_layers": 1 << 24}},
        "layers have MLPs of [40, 40, 40, 40, 80], which is not supported",
    ),
    "a width": (
        {"keys": {"attention.key_length": 1 << 24, "rope.dimension_count": 1 << 24}},
        "rope_freqs.weight are not 1 up to a pair and 1e+30 after",
    ),
    "rotation": (
        {"keys": {"rope.dimension_count_swa": 4}},
        "a default rotation of 4 values of 6 is not supported",
    ),
    "scaling": (
        {"keys": {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}},
        "a linear rotation of 16 values of 16 is not supported",
    ),
    "factors": (
        {"tensors": {"rope_freqs.weight": np.full(8, 2, np.float32)}},
        "rope_freqs.weight are not 1 up to a pair and 1e+30 after",
    ),
    "a table": (
        {"keys": {"embedding_length_per_layer_input": 6}},
        "missing tensor per_layer_token_embd.weight",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files(case: str, tmp_path: Path) -> None:
    changes, message = WRONG[case]
    path = write_trunk(tmp_path / "a.gguf", make_trunk("dense"), **changes)
    with pytest.raises(CheckpointError) as caught:
        find_model(str(path))
    assert str(caught.value).endswith(f": {message}")
    assert "\n" not in str(caught.value)


def test_wrong_heads(tmp_path: Path) -> None:
    path = write_trunk(tmp_path / "a.gguf", make_trunk("dense"))
    trunk = load_config(find_model(str(path)).folder)

    def refuse(head: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            read_head_config(head, path, trunk)
        return str(caught.value).removeprefix(f"--mtp {head}: ")

    other = write_head(tmp_path / "other.gguf", make_assistant("dense", backbone=40))
    assert refuse(other).startswith("its trunk has backbone_hidden_size 40, the model 24")
    assert refuse(path).startswith(
        "architecture gemma4: only eagle3, gemma4-assistant, gemma4_mtp, dflash are read here"
    )


def test_groups_of_tokens_are_left_out(tmp_path: Path) -> None:
    """Files tell them in another way, and llama.cpp computes all tokens, too."""
    path = write_trunk(tmp_path / "a.gguf", make_trunk("dense"))
    groups: dict[str, Any] = {
        "mtp_centroids.weight": np.zeros((8, 20), np.float32),
        "mtp_token_ordering.weight": np.zeros(60, np.int32),
    }
    head = write_head(tmp_path / "b.gguf", make_assistant("dense"), others=True, tensors=groups)
    config = read_head_config(head, path, load_config(find_model(str(path)).folder))
    plain = write_head(tmp_path / "c.gguf", make_assistant("dense"), others=True)
    assert open_head(head, config).tensors.keys() == open_head(plain, config).tensors.keys()


SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|tool_call>", "<turn|>", "<|tool_response>"]
ODD = [
    *model_tokenizers.TEXTS[:3],
    *("", " ", "  a", "a  b", "\n\n\nx", "it's It'S 12345 ١٢٣ ½ Ⅷ", "\t\tif x:\r\n  y", "A\u030a"),
    *(
        "👩‍👩‍👧 ok",
        "a\u00a0b",
        "...!!!???",
        "日本語 テスト",
        "x" * 40,
        "\u200bzero",
        "\n a\n\n b \n",
    ),
    *("\x00\x01", "▁a ▁▁b", "<0x0A>", "<|tool_call>call:f{a:1}<turn|>", "the  the   the", " \n \n"),
    *(word * 3 for word in ("quick", " brown", "fox\n", "12", "·", "лаз", "<|", "▁", "é", "\r")),
    *(" ".join(text.split()[::-1]) for text in model_tokenizers.TEXTS[:3]),
    *(text[start:] for text in model_tokenizers.TEXTS[:3] for start in range(1, 40, 7)),
]


def make_vocabulary() -> dict[str, Any]:
    """Train a BPE whose tokens have U+2581 for spaces, and return the keys of a file with it."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("\n", "isolated")
    texts = [text for text in model_tokenizers.TEXTS for _ in range(3)]
    backend.train_from_iterator(texts, BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(backend.to_str())["model"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    ids = model["vocab"]
    tokens = [*SPECIAL, *bytes_, *sorted(ids, key=lambda token: ids[token])]
    types = [3] * 4 + [4] + [3] * 2 + [6] * 256 + [1] * len(ids)
    return {
        "general.architecture": "gemma4", "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3, "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip


def test_the_tokenizer_is_transformers(tmp_path: Path) -> None:
    keys = make_vocabulary()
    file = GgufFile(Path("a.gguf"), keys, {})
    ours = make_tokenizer(file, list_splits())
    assert ours is not None
    merges = [tuple(pair.split(" ")) for pair in keys["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(keys["tokenizer.ggml.tokens"])}
    theirs = GemmaTokenizer(vocab=vocabulary, merges=merges, additional_special_tokens=SPECIAL[4:])
    for text in ODD:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    files = dict(tokenizer_files(file, tmp_path, list_splits()))
    assert json.loads(files["tokenizer_config.json"])["add_bos_token"] is True
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [1, 5, 6]


def test_a_head_in_floats_is_int8_beside_integers(tmp_path: Path) -> None:
    """Its floats would take longer than its drafts save."""
    sizes = WIDE_SHAPES["dense"]
    trunk = write_trunk(tmp_path / "a.gguf", make_trunk("dense", **sizes), Type.Q4_0)
    width = sizes["hidden_size"]
    head = save(make_assistant("dense", backbone=width, **sizes), tmp_path / "head")
    request = build_request(trunk, (1,), out=tmp_path / "e", mtp=head, max_seq_len=100)
    entries = list_entries(build(request)[0].folder / WEIGHTS)
    stored = {entry.name: entry.shape[-1] // 128 for entry in entries}
    products = {name: bits for name, bits in stored.items() if name.endswith("_proj.values")}
    assert {bits for name, bits in products.items() if not name.startswith("mtp.")} == {4}
    products |= {"mtp.0.lm_head.values": stored["mtp.0.lm_head.values"]}
    assert {bits for name, bits in products.items() if name.startswith("mtp.")} == {8}
