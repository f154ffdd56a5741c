"""Writes folders of small tokenizers with the features and files of published ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
TEXTS = [
    "def hello(world): return 1 + 2  # größer, 你好世界, 🙂 и привет, мир",
    "The quick brown fox\n\n    jumps over\t\tthe lazy dog; it's 12345 o'clock.",
    "<think>user assistant system function result</think> name arguments",
] * 4
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GLM_PATTERN = QWEN_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

Files = dict[str, Any]  # name -> text, or a value to write as JSON


def special(*texts: str) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in texts]


def plain(*texts: str, normalized: bool = False) -> list[AddedToken]:
    return [AddedToken(text, special=False, normalized=normalized) for text in texts]


def train(
    split: list[pre_tokenizers.PreTokenizer],
    added: list[AddedToken],
    *,
    first: list[str] | None = None,
    normalizer: normalizers.Normalizer | None = None,
    post_processor: processors.PostProcessor | None = None,
) -> tokenizers.Tokenizer:
    """Train a byte-level BPE; special tokens `first` are in the vocabulary, `added` follow it."""
    backend = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=special(*(first or [])),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_tokens(added)
    if post_processor is not None:
        backend.post_processor = post_processor
    return backend


def by_regex(*patterns: str) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]


def added_tokens_decoder(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    tokens = sorted(backend.get_added_tokens_decoder().items())
    return {str(id): {flag: getattr(token, flag) for flag in flags} for id, token in tokens}


def template(name: str) -> str:
    return (TEMPLATES / f"{name}_like.jinja").read_text(encoding="utf-8")


def glm() -> Files:
    """Write one without BOS: the template, a file of its own, writes [gMASK]<sop>."""
    roles = [f"<|{role}|>" for role in ("system", "user", "assistant", "observation")]
    added = special("<|endoftext|>", "[MASK]", "[gMASK]", "<sop>", "<eop>", *roles)
    added += plain("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>")
    added += plain("/nothink", "<tool_response>", "</tool_response>", "<arg_value>", "</arg_value>")
    backend = train(
        by_regex(GLM_PATTERN), added, post_processor=processors.ByteLevel(trim_offsets=False)
    )
    config = {
        "added_tokens_decoder": added_tokens_decoder(backend),
        "additional_special_tokens": ["<|endoftext|>", "[MASK]", "[gMASK]", "<sop>", *roles],
        "clean_up_tokenization_spaces": False, "do_lower_case": False, "eos_token": "<|endoftext|>",
        "extra_special_tokens": {}, "pad_token": "<|endoftext|>", "padding_side": "left",
        "remove_space": False, "tokenizer_class": "PreTrainedTokenizer",
    }  # fmt: skip
    return folder_of(backend, config) | {"chat_template.jinja": template("glm")}


def gigachat() -> Files:
    """Write one with newline separators, an old special_tokens_map.json, a post-processed BOS."""
    first = ["<unk>", "<s>", "</s>"]
    added = special("<|role_sep|>\n", "<|message_sep|>\n\n", "<|function_call|>")
    bos = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    pattern = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}]*[\p{Ll}\p{M}]+|\p{N}{1,3}|\s+(?!\S)|\s+"
    backend = train(by_regex(pattern), added, first=first, post_processor=bos)
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>"} | flags(), "unk_token": "<unk>"}
    config = {
        "add_bos_token": True, "chat_template": template("gigachat"), "model_max_length": 131072,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    return folder_of(backend, config) | {"special_tokens_map.json": names}


def qwen3_5() -> Files:
    """Do what `qwen` does; its template is a file of its own, and its calls are in tags."""
    files = qwen("<tool_response>", "</tool_response>", "<|image_pad|>")
    config = dict(files["tokenizer_config.json"])
    del config["chat_template"]
    return files | {"tokenizer_config.json": config, "chat_template.jinja": template("qwen3_5")}


def qwen(*more: str) -> Files:
    """Write one that normalises to NFC, without BOS, its template in tokenizer_config.json."""
    added = special("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_pad|>")
    added += plain("<tool_call>", "</tool_call>", "<think>", "</think>", *more)
    backend = train(
        by_regex(QWEN_PATTERN),
        added,
        normalizer=normalizers.NFC(),
        post_processor=processors.ByteLevel(trim_offsets=False),
    )
    config = {
        "add_bos_token": False, "add_prefix_space": False,
        "added_tokens_decoder": added_tokens_decoder(backend),
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|vision_pad|>"],
        "bos_token": None, "chat_template": template("qwen"), "eos_token": "<|im_end|>",
        "errors": "replace", "pad_token": "<|endoftext|>", "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
    }  # fmt: skip
    return folder_of(backend, config)


def deepseek() -> Files:
    """Write one with several splits in a row, and tokens with characters that are no byte."""
    names = [f"tool▁{part}" for part in ("calls▁begin", "calls▁end", "call▁begin", "call▁end")]
    names += [f"tool▁{part}" for part in ("outputs▁begin", "outputs▁end", "output▁begin")]
    marks = [f"<｜{name}｜>" for name in (*names, "tool▁output▁end", "tool▁sep")]
    added = plain("<｜User｜>", "<｜Assistant｜>", *marks, normalized=True)
    added += plain("<think>", "</think>", normalized=True)
    words = r"[!-/:-~]+[A-Za-z]+|[^\r\n\p{L}]?[\p{L}\p{M}]+|\s+"
    backend = train(
        by_regex(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", words),
        added,
        first=["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"],
        post_processor=processors.ByteLevel(trim_offsets=False),
    )
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": {"__type": "AddedToken", "content": "<｜begin▁of▁sentence｜>"} | flags(),
        "chat_template": [
            {"name": "default", "template": template("deepseek")},
            {"name": "tool_use", "template": "{# with tools #}" + template("deepseek") + "!"},
        ],
        "eos_token": {"__type": "AddedToken", "content": "<｜end▁of▁sentence｜>"} | flags(),
        "tokenizer_class": "LlamaTokenizerFast",
        "unk_token": None,
    }
    return folder_of(backend, config)


def gemma4() -> Files:
    """Write one of SentencePiece's kind; template and post-processor both write the BOS."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = BpeTrainer(vocab_size=300, show_progress=False)
    trained.train_from_iterator(TEXTS, trainer)
    model = json.loads(trained.to_str())["model"]
    first = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: id for id, token in enumerate([*first, *model["vocab"]])}
    merges = [tuple(pair) for pair in model["merges"]]
    bpe = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(bpe)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    pairs = [("<|turn>", "<turn|>"), ("<|channel>", "<channel|>"), ("<|tool>", "<tool|>")]
    pairs += [(f"<|tool_{part}>", f"<tool_{part}|>") for part in ("call", "response")]
    marks = [mark for pair in pairs for mark in pair]
    backend.add_tokens(special("<pad>", "<eos>", "<bos>", "<unk>", *marks, "<|think|>", '<|"|>'))
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 2)]
    )
    names = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
    config = names | {"tokenizer_class": "PreTrainedTokenizerFast"}
    return folder_of(backend, config) | {"chat_template.jinja": template("gemma4")}


def flags() -> dict[str, bool]:
    return {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}


def folder_of(backend: tokenizers.Tokenizer, config: dict[str, Any] | None) -> Files:
    files: Files = {"tokenizer.json": backend.to_str()}
    return files if config is None else files | {"tokenizer_config.json": config}


def write_files(folder: Path, files: Files) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        path.write_text(text, encoding="utf-8")
    return folder


FAMILIES: dict[str, Callable[[], Files]] = {
    "glm": glm, "gigachat": gigachat, "qwen": qwen, "qwen3.5": qwen3_5, "deepseek": deepseek,
    "gemma4": gemma4,
}  # fmt: skip
