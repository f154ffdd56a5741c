"""Qwen3.5-4B's repository with small sizes: names, shards and files as published, by its name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mtpbuild.builder.checkpoint.shards import INDEX
from mtpbuild.lab.verify.plain import load_plain
from mtpbuild.runtime import Engine
from mtpbuild.runtime.contract.manifest import read_manifest
from tests.support.invoke import invoke
from tests.support.loopback_hub import Hosted, LoopbackHub, connect, serving
from tests.support.model_tokenizers import qwen3_5

pytestmark = pytest.mark.full
NAME = "Qwen/Qwen3.5-4B"
SHARDS = tuple(f"model.safetensors-0000{i}-of-00002.safetensors" for i in (1, 2))
NOT_READ = ("README.md", "vocab.json", "merges.txt", "preprocessor_config.json")
DATA = Path(__file__).parents[1] / "data"
CONFIG: dict[str, Any] = json.loads((DATA / "qwen3.5-small-config.json").read_text())
TEXT: dict[str, Any] = CONFIG["text_config"]


def module() -> dict[str, Tensor]:
    """Make the MTP module, which transformers does not know."""
    E, inner = TEXT["hidden_size"], TEXT["intermediate_size"]
    D, H, G = TEXT["head_dim"], TEXT["num_attention_heads"], TEXT["num_key_value_heads"]
    layer = {
        "mlp.gate_proj": (inner, E),
        "mlp.up_proj": (inner, E),
        "mlp.down_proj": (E, inner),
        "self_attn.q_proj": (2 * H * D, E),
        "self_attn.k_proj": (G * D, E),
        "self_attn.v_proj": (G * D, E),
        "self_attn.o_proj": (E, H * D),
        "self_attn.q_norm": (D,),
        "self_attn.k_norm": (D,),
        "input_layernorm": (E,),
        "post_attention_layernorm": (E,),
    }
    shapes: dict[str, tuple[int, ...]] = {f"layers.0.{name}": s for name, s in layer.items()}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    shapes |= {"fc": (E, 2 * E)} | dict.fromkeys(norms, (E,))
    return {f"mtp.{name}.weight": 0.1 * torch.randn(shape) for name, shape in shapes.items()}


def stored(name: str, tensor: Tensor) -> Tensor:
    """Return it in bf16, except for what is published in fp32."""
    return tensor if name.endswith(("A_log", "linear_attn.norm.weight")) else tensor.bfloat16()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return the folder of all files, and transformers' model of these weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder, files = tmp_path_factory.mktemp("hosted") / "model", qwen3_5()
    folder.mkdir()
    added = json.loads(files["tokenizer.json"])["added_tokens"]
    (end,) = (token["id"] for token in added if token["content"] == "<|endoftext|>")
    # The EOS of documents, as published; that of turns is the tokenizer's alone.
    config = CONFIG | {"text_config": TEXT | {"eos_token_id": end}}
    files |= {"config.json": config} | dict.fromkeys(NOT_READ, "{}")
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**files["config.json"])).float().eval()
    tensors = model.state_dict() | module()
    del tensors["lm_head.weight"]  # it is the embedding
    tensors = {
        name: stored(name, torch.randn(t.shape) * 0.1 if t.dim() > 1 else t)
        for name, t in tensors.items()
    }
    model.load_state_dict({n: t for n, t in tensors.items() if n[:4] != "mtp."}, strict=False)
    names = list(tensors)
    shards = dict(zip(SHARDS, (names[::2], names[1::2]), strict=True))
    for shard, own in shards.items():
        save_file({n: tensors[n].contiguous() for n in own}, folder / shard, {"format": "pt"})
    places = {name: shard for shard, own in shards.items() for name in own}
    size = sum(tensor.nbytes for tensor in tensors.values())
    files[INDEX] = {"metadata": {"total_size": size}, "weight_map": places}
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return folder, model


@pytest.fixture
def hub(
    repository: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LoopbackHub]:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    with serving() as hub:
        hub.repositories[NAME] = Hosted(repository[0])
        connect(monkeypatch, hub, tmp_path / "hf")
        yield hub


def test_it_is_built_by_its_name(
    hub: LoopbackHub, repository: tuple[Path, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = repository
    flags = ("--nextn", "2", "--max-seq-len", "128", "--prefill-chunk", "16")
    code, out, err = invoke("build", "--model", NAME, *flags, "--weights", "int4")
    assert (code, err) == (0, "")
    assert hub.files == {path.name for path in folder.iterdir()} - set(NOT_READ)
    assert "the vision tower (" in caplog.text
    engine = Path("engines/qwen3_5_4b_n2_int4")
    manifest = read_manifest(engine)
    assert (manifest.build.weights, manifest.build.drafter) == ("int4", "mtp-eagle")
    with Engine.load(engine, threads=1) as loaded:
        assert loaded.tokenizer is not None
        ends = list(map(loaded.tokenizer.find_special_name, manifest.model.eos_token_ids))
    assert ends == ["<|endoftext|>", "<|im_end|>"]
    code, out, err = invoke("run", "--engine", engine, "--chat", "hello", "--max-tokens", "9")
    assert code == 0
    assert out
    assert err.startswith("9 tokens (length), ")


def test_it_is_transformers_model(repository: tuple[Path, Any]) -> None:
    """The wrapper's own class reads the same tensors, whose module it does not know."""
    folder, model = repository
    ours, tokens = load_plain(folder), torch.arange(100)[None]
    with torch.no_grad():
        main = ours.main(tokens)
        difference = (ours.logits(main) - model(tokens).logits).abs()
    assert difference.max() < 2e-4
