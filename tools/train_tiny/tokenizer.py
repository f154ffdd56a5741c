"""Trains and stores the tokenizer, a byte-level BPE of 2,048 tokens, with its chat template."""

import json
import string
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
NAMED = [BOS, EOS, "<think>", "</think>", USER, ASSISTANT]
FIM = ["<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"]
SPECIAL = [*NAMED, *FIM, *(f"<｜reserved▁{i}｜>" for i in range(9, 16))]
BOS_ID, EOS_ID, THINK_ID, USER_ID, ASSISTANT_ID = 0, 1, 2, 4, 5
VOCABULARY = 2048

# Words with the space before them; single digits; runs of white space without their last space.
PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{%- set ns = namespace(system='') -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{%- set ns.system = ns.system + message['content'] -%}"
    "{%- endif -%}{%- endfor -%}"
    "{{- bos_token + ns.system -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{- '<｜User｜>' + message['content'] -}}"
    "{%- elif message['role'] == 'assistant' -%}"
    "{{- '<｜Assistant｜>' + message['content'].split('</think>')[-1].lstrip('\\n')"
    " + '<｜end▁of▁sentence｜>' -}}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<｜Assistant｜><think>\\n' -}}{%- endif -%}"
)


def letters() -> str:
    """Return text that makes the BPE learn every letter as a token, alone and after a space."""
    lower = string.ascii_lowercase
    return "".join(f"{a} {b}\n" for a in lower for b in lower)


def train(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        # As in DeepSeek-R1, the thinking markers are visible text.
        special_tokens=[
            AddedToken(t, special="think>" not in t, normalized=False) for t in SPECIAL
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_with_letters(texts), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    check(tokenizer)
    return tokenizer


def _with_letters(texts: Iterable[str]) -> Iterator[str]:
    yield from texts
    yield from [letters()] * 20


def check(tokenizer: Tokenizer) -> None:
    """Assert the properties that data and template rely on."""
    vocabulary = tokenizer.get_vocab()
    assert len(vocabulary) == VOCABULARY
    assert [tokenizer.id_to_token(i) for i in range(16)] == SPECIAL
    assert all(c in vocabulary and f"Ġ{c}" in vocabulary for c in string.ascii_lowercase)
    assert not any(
        len(t) > 1 and any(c.isdigit() for c in t) for t in list(vocabulary) if t not in SPECIAL
    )


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }
    folder.mkdir(parents=True, exist_ok=True)
    stored = json.loads(tokenizer.to_str())
    for token in stored["added_tokens"]:  # as in DeepSeek's, decoding keeps the markers
        token["special"] = token["content"] not in ("<think>", "</think>")
    text = json.dumps(stored, indent=2, ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def chat(question: str, reply: str, system: str = "") -> str:
    """Return one finished exchange in the form for training, end token included."""
    return f"{BOS}{system}{USER}{question}{ASSISTANT}<think>\n{reply}{EOS}"


def generation_prompt(question: str, system: str = "") -> str:
    return f"{BOS}{system}{USER}{question}{ASSISTANT}<think>\n"
