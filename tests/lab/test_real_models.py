"""Published models, beside transformers: logits, formats, tokenizers, templates.

They are fetched by `tools/real_models.py`; without a network these tests skip.
"""

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mtpbuild.builder.checkpoint.config import KeyRows
from mtpbuild.builder.gguf.container import read_file
from mtpbuild.builder.gguf.tokenizer import make_tokenizer
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.weights.balance import BalancedReader
from mtpbuild.builder.weights.gguf_folder import list_splits
from mtpbuild.lab.verify.plain import load_plain
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.text.tokenizer import Tokenizer
from tests.support import model_tokenizers
from tests.support.scripts import ROOT

pytestmark = pytest.mark.full
TOOL: dict[str, Any] = runpy.run_path(str(ROOT / "tools" / "real_models.py"))
# Flags of a build -> most KL from fp32: a tenth above what was measured (docs/quantisation.md).
LIMITS = {
    "floats": 1e-5,
    "int8": 0.0043,
    "int8 --cache-dtype int8": 0.0063,
    "int4": 0.166,
    "int4 --calibrate": 0.062,
    "int4 --weight-bits 5.0": 0.1,
}
ODD = (
    "  two  spaces   three", "\n\n\nx\n", "\t\tif x:\n\t\t\treturn", "naïve café",
    "日本語テキスト", "😀👩\u200d👩\u200d👧\u200d👦 emoji", "a\u0301b e\u0301",
    "<|im_start|>user\nhi<|im_end|>", "<0x0A>", "1234567 3.14159", "don't we'll I'M",
    "ﬁ ligature", "\u0301combining", "\x00\x01", "Ünïcödé ÀÉÎ", "مرحبا بالعالم", "שלום",
    "Привет мир", "    indented\n        more", "trailing ", "   ", "a" * 300,
    "http://x.y/z?a=b&c=d", "#include <stdio.h>", "𝒳𝒴𝒵", "\r\nwin\r\n", "foo\u00a0bar",
    "ẛ̣", "<b>bold</b>", "<start_of_turn>user", "[multimodal]", "xxx" + " " * 40 + "y",
    "\n" * 35, "$\\alpha_1^2$", "C++ & C#", "हिन्दी में", "ไทย", "한국어 문장",
    "CamelCaseWord", "snake_case_word", "—dash–en", "“quotes”", "…", "½⅓",
    "\u200bzero\u200dwidth", "\ud7ff\ue000", "Hello world", "x\ty", "0b1010 0xFF 1e-5",
    "...!!!???",
)  # fmt: skip


class Oracle:
    """transformers' model, with the two functions that a comparison calls."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        self.model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()

    def main(self, tokens: Tensor) -> Tensor:
        return tokens

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens).logits
        return logits


class Norms:
    """The norms of a GGUF file, as a checkpoint that only balancing reads; no bias, as Gemma's."""

    norms_minus_one = False

    def __init__(self, path: Path) -> None:
        self.tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    def read(self, name: str) -> Tensor:
        layer, kind = re.findall(r"layers\.(\d+)\.self_attn\.([qk])_norm", name)[0]
        values = self.tensors[f"blk.{layer}.attn_{kind}_norm.weight"].data
        return torch.from_numpy(np.array(values))

    def find_key_rows(self, at: str) -> KeyRows:
        return KeyRows(at, 256, 256, 4, has_norm=True, has_bias=False)


def test_balanced_keys_of_gemma_lose_less() -> None:
    """By Gemma 3's norms the errors of int8 keys' scores fall by half as much again."""
    norms: Any = Norms(fetch("GEMMA3"))
    reader = BalancedReader(norms, norms, norms)
    gains = list[float]()
    for layer in range(18):
        name = f"model.layers.{layer}.self_attn."
        names = [f"{name}{kind}_norm.weight" for kind in "qk"]

        def measure_error(q: Tensor, k: Tensor) -> float:
            torch.manual_seed(0)
            queries, keys = torch.randn(300, 256) * q, torch.randn(300, 256) * k
            scale = keys.abs().amax(-1, keepdim=True) / 127
            errors = queries @ ((keys / scale).round() * scale - keys).mT
            return float(errors.square().mean().sqrt())

        before, after = ([source.read(n) for n in names] for source in (norms, reader))
        gains.append(measure_error(*before) / measure_error(*after))
    assert min(gains) > 1.0
    assert float(torch.tensor(gains).log().mean().exp()) > 1.4


def fetch(name: str) -> Path:
    try:
        path: Path = TOOL["fetch"](TOOL[name])
    except OSError as error:
        pytest.skip(str(error))
    return path


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return fetch("SMOLLM2")


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> Oracle:
    return Oracle(smollm2)


@pytest.fixture(params=LIMITS)
def engine(
    request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Engine]]:
    weights, *flags = request.param.split()
    folder = tmp_path_factory.mktemp("real")
    with TOOL["build_engine"](smollm2, folder, weights, *flags) as engine:
        yield request.param, engine


def test_engines_say_what_transformers_says(engine: tuple[str, Engine], oracle: Oracle) -> None:
    flags, loaded = engine
    found = TOOL["measure"](loaded, oracle, TOOL["cut_pieces"](loaded))
    assert found.positions > 4000
    assert found.kl < LIMITS[flags], flags
    assert found.same > 0.999 or flags != "floats"


@torch.no_grad()
def test_the_plain_model_is_transformers(smollm2: Path, oracle: Oracle) -> None:
    plain = load_plain(find_model(str(smollm2)).folder)
    tokens = torch.tensor([oracle.tokenizer("def add(a, b):\n    return a + b\n" * 4)["input_ids"]])
    ours = plain.logits(plain.main(tokens))
    torch.testing.assert_close(ours, oracle.logits(tokens), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["SMOLLM2", "GEMMA3"])
def test_tokenizers_are_equal(name: str) -> None:
    from transformers import AutoTokenizer

    path = fetch(name)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend = make_tokenizer(read_file(path), list_splits())
    assert backend is not None
    ours = Tokenizer(backend)
    for text in (*ODD, *model_tokenizers.TEXTS):
        wanted = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == wanted, text
        assert ours.text(wanted) == text or "<" in text


def test_a_chat_of_three_turns(smollm2: Path, oracle: Oracle, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    with TOOL["build_engine"](smollm2, tmp_path, "int8") as engine:
        for question in ("And of Italy?", "Which is larger?", ""):
            ids = engine.chat_ids(messages)
            wanted = oracle.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            assert ids == list(wanted["input_ids"])
            answer = engine.generate(ids, SamplingParams(max_tokens=60)).text
            assert any(city in answer for city in ("Paris", "Rome", "Italy", "France"))
            messages += [{"role": "assistant", "content": answer}]
            messages += [{"role": "user", "content": question}]


def test_dequantised_weights_make_the_same_engine(
    smollm2: Path, oracle: Oracle, tmp_path: Path
) -> None:
    (tmp_path / "floats").mkdir()
    weights = {name: weight.contiguous() for name, weight in oracle.model.state_dict().items()}
    del weights["lm_head.weight"]  # tied
    save_file(weights, tmp_path / "floats" / "model.safetensors")
    raw = oracle.model.config.to_dict()
    raw.pop("quantization_config", None)
    (tmp_path / "floats" / "config.json").write_text(json.dumps(raw, default=str))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copy = (find_model(str(smollm2)).folder / name).read_bytes()
        (tmp_path / "floats" / name).write_bytes(copy)
    texts, params = [], SamplingParams(max_tokens=40, logprobs=0)
    for model in (smollm2, tmp_path / "floats"):
        with TOOL["build_engine"](model, tmp_path, "floats") as engine:
            result = engine.generate("Once upon a time", params)
            assert result.logprobs is not None
            texts.append((result.token_ids, [step.logprob for step in result.logprobs]))
    assert texts[0][0] == texts[1][0]
    assert texts[0][1] == pytest.approx(texts[1][1], abs=1e-4)
