"""A module for a trunk that has none, before it is trained, and prompts that the model writes."""

import json
from pathlib import Path

import torch
from torch import Tensor

from mtpbuild.builder.checkpoint.side_files import CONFIG
from mtpbuild.builder.compiler.quantize import write_json
from mtpbuild.builder.compiler.source import ModelSource
from mtpbuild.builder.engine.staged import stage_folder
from mtpbuild.builder.formats import Entry
from mtpbuild.builder.models import find_family_of, load_config
from mtpbuild.builder.models.common.plain import PlainCausalLM
from mtpbuild.builder.stages import Watch
from mtpbuild.builder.weights.checkpoint import Checkpoint
from mtpbuild.builder.weights.head import TRUNK, describe_trunk
from mtpbuild.builder.weights.placed import split_into_shards, write_shards
from mtpbuild.lab.measure.own_texts import read_answers, write_answers
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.configuration.input_file import FileRequest
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.files import read_json

BY_MODEL = "--prompts-by-model"
TURN = 128  # tokens of a user's turn at most
SHORTEST = 8  # characters
USER = "what the user says 7421"
QUANTISATION = ("quantization_config", "quantization")  # of the trunk alone
TURNS, PROMPTS = "turns.jsonl", "prompts.jsonl"


def write_new_head(checkpoint: Checkpoint, source: ModelSource, folder: Path) -> None:
    """Write a module whose layer is a copy of the trunk's last one.

    Its input product passes on the hidden state, so that the copied layer sees what the trunk's
    layers see, and a random product of the embedding.
    """
    config = load_config(source.folder, modules=1)
    with torch.device("meta"):
        plain = find_family_of(config).reference(config)
    assert isinstance(plain, PlainCausalLM)
    at = f"model.layers.{config.num_hidden_layers - 1}."
    torch.manual_seed(0)

    def make(part: str, shape: torch.Size) -> Tensor:
        stored = at + part.removeprefix("layers.0.")
        if stored in checkpoint.tensors:
            return checkpoint.read(stored)
        if part == f"{config.module_names.input_proj}.weight":
            hidden = torch.eye(config.hidden_size)
            random = torch.randn(hidden.shape) / config.hidden_size**0.5
            return torch.cat([hidden, random] if config.mtp.hidden_first else [random, hidden], 1)
        assert part.endswith("norm.weight"), part
        return torch.zeros(shape) if config.norms_minus_one else torch.ones(shape)

    parts = plain.module(1).state_dict()
    names = {f"{config.name_module(0)}.{part}": part for part in parts}
    entries = {name: Entry("BF16", tuple(parts[part].shape)) for name, part in names.items()}
    with stage_folder(folder, "head") as staged:
        read = ((name, make(part, parts[part].shape)) for name, part in names.items())
        write_shards(staged.folder, split_into_shards(entries), read)
        write_config(source, checkpoint, staged.folder)


def write_config(source: ModelSource, checkpoint: Checkpoint, folder: Path) -> None:
    """Write a head's config.json: the trunk's, with what tells the trunk from others."""
    raw = read_json(source.folder / CONFIG)
    kept = {name: raw[name] for name in raw if name not in QUANTISATION}
    write_json(folder / CONFIG, {**kept, TRUNK: describe_trunk(checkpoint, source.name)})


def write_prompts(engine: Engine, count: int, least: int, folder: Path, watch: Watch) -> None:
    """Let the model write so many users' turns by its template; those that end are prompts.

    Raises UsageError if these are fewer than `least`.
    """
    if engine.tokenizer is None or engine.tokenizer.chat_template is None:
        raise UsageError(f"{BY_MODEL} needs a model with a chat template: give --data")
    chat = engine.tokenizer.chat_prompt([{"role": "user", "content": USER}])
    before, found, _ = chat.rpartition(USER)
    if not found:
        raise UsageError(f"{BY_MODEL}: the chat template hides what a user says: give --data")
    ids = engine.tokenizer.encode(before, add_special_tokens=False)
    turns = [
        FileRequest(i, ids, SamplingParams(max_tokens=TURN, temperature=1.0, seed=i))
        for i in range(count)
    ]
    write_answers(engine, turns, folder / TURNS, watch)
    ended = (turn.answer for turn in read_answers(folder / TURNS) if len(turn.answer) < TURN)
    texts = dict.fromkeys(engine.tokenizer.text(answer).strip() for answer in ended)
    lines = [
        json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n"
        for text in texts
        if len(text) >= SHORTEST
    ]
    if len(lines) < least:
        raise UsageError(
            f"{BY_MODEL} {count}: the model wrote {len(lines)} prompts that end, at least {least} "
            "are needed: ask for more"
        )
    new = folder / f"{PROMPTS}.new"
    new.write_text("".join(lines), encoding="utf-8")
    new.replace(folder / PROMPTS)
