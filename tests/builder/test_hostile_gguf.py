"""Damaged and hostile GGUF headers: each ends in one line, and takes no more than its bytes do."""

import mmap
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import GGMLQuantizationType as Type

from mtpbuild.builder.checkpoint.generation import read_generation_ids
from mtpbuild.builder.gguf.header import MAGIC, HeaderBytes, parse_header
from mtpbuild.builder.models import load_config
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.runtime.errors import CheckpointError
from tests.support.gguf_files import random_tensors, usual, write_gguf

Parts = tuple[dict[str, bytes], dict[str, bytes]]  # keys and tensors with all that follows a name
MEGABYTE, HUGE = 1 << 20, 1 << 40
TEXT, ARRAY = 8, 9
TOKENS = [chr(0x100 + i) for i in range(60)] + ["\u0100\u0101"]


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * len(TOKENS))
    writer.add_token_merges(["\u0100 \u0101"])
    writer.add_eos_token_id(3)


def write_small(path: Path, model: str = "qwen3.5") -> tuple[Parts, bytes]:
    """Write a small model; return the parts of its header, and its tensors' bytes."""
    c, tensors = random_tensors(model, vocab_size=len(TOKENS))
    write_gguf(path, c, tensors, usual(Type.Q8_0), more=add_tokenizer)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header, keys, infos = HeaderBytes(data), dict[str, bytes](), dict[str, bytes]()
        _, count, more = header.numbers("IQQ")
        for part, size, read in ((keys, more, header.value), (infos, count, header.tensor)):
            for _ in range(size):
                start = header.at
                name = header.name()
                begin, header.at = header.at, header.at if read == header.value else start
                read()
                part[name] = data[begin : header.at]
        return (keys, infos), data[-(-header.at // 32) * 32 :]


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def encode(parts: Parts, data: bytes) -> bytes:
    keys, tensors = parts
    head = MAGIC + struct.pack("<IQQ", 3, len(tensors), len(keys))
    for part in parts:
        head += b"".join(text(name) + rest for name, rest in part.items())
    return head + bytes(-len(head) % 32) + data


def say(path: Path) -> str:
    """Open a file and check it; return the one line that refuses it, or "" if none does."""
    tracemalloc.start()
    says = ""
    try:
        folder = find_model(str(path)).folder
        config = load_config(folder)
        read_generation_ids(folder, config)
        checkpoint = open_checkpoint(folder)
        table = checkpoint.check(checkpoint.settle(config))
        for stored in table.stored:
            checkpoint.read(stored)
    except CheckpointError as error:
        says = str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 * MEGABYTE + 12 * path.stat().st_size
    assert "\n" not in says
    assert len(says) < 600
    return says


def number(kind: int, letter: str, value: Any) -> bytes:
    return struct.pack(f"<I{letter}", kind, value)


def array(kind: int, count: int, rest: bytes = b"") -> bytes:
    return struct.pack("<IIQ", ARRAY, kind, count) + rest


INT, LONG, NAMES = (4, "I"), (10, "Q"), "tokenizer.ggml."
HOSTILE: dict[str, tuple[str, bytes, str]] = {
    "an array of 2^40 texts": (f"{NAMES}tokens", array(TEXT, HUGE), "an array of 1,099,511,627,7"),
    "an array of 2^40 numbers": (f"{NAMES}scores", array(6, HUGE), "an array of 1,099,511,627,776"),
    "an array beyond the file": (f"{NAMES}scores", array(6, 1 << 20), "4,194,304 bytes are annou"),
    "texts beyond the file": (f"{NAMES}tokens", array(TEXT, 1 << 20, text("a")), "bytes are annou"),
    "a text of 2^63": ("general.name", number(TEXT, "Q", 1 << 63), "bytes are announced"),
    "an array in an array": ("x", array(ARRAY, 1, array(4, 1)[4:]), "a value of kind 9"),
    "an unknown kind": ("x", number(77, "I", 1), "a value of kind 77"),
    "a name without letters": ("", number(*INT, 1), "a name is ''"),
    "a name of two lines": ("a\nb", number(*INT, 1), r"a name is 'a\nb'"),
    "a text that is not UTF-8": ("x", struct.pack("<I", TEXT) + text(b"\xff"), "can't decode"),
    "block_count 2^31": ("qwen35.block_count", number(*INT, 1 << 31), "block_count must be an"),
    "block_count 2^20": ("qwen35.block_count", number(*INT, 1 << 20), "1048575 layers and 1 MTP m"),
    "block_count 0": ("qwen35.block_count", number(*INT, 0), "must be an integer of 1..16777216"),
    "block_count of text": ("qwen35.block_count", struct.pack("<I", 8) + text("4"), "integer of 1"),
    "more modules than blocks": ("qwen35.nextn_predict_layers", number(*INT, 9), "-4 layers and 9"),
    "key_length 0": ("qwen35.attention.key_length", number(*INT, 0), "key_length must be an int"),
    "state_size 2^24": ("qwen35.ssm.state_size", number(*INT, 1 << 24), "weight has shape"),
    "time_step_rank 0": ("qwen35.ssm.time_step_rank", number(*LONG, 0), "must be an integer of 1"),
    "inner_size -1": ("qwen35.ssm.inner_size", number(5, "i", -1), "must be an integer of 1"),
    "theta of NaN": ("qwen35.rope.freq_base", number(6, "f", float("nan")), "rope_theta must be"),
    "epsilon of text": (
        "qwen35.attention.layer_norm_rms_epsilon", struct.pack("<I", 8) + text("a"), "be a float",
    ),
    "an array for a size": ("qwen35.embedding_length", array(4, 1, bytes(4)), "must be an integer"),
    "an alignment of 0": ("general.alignment", number(*INT, 0), "general.alignment is 0"),
    "no architecture": ("general.architecture", struct.pack("<I", 8) + text(""), "is not read; su"),
    "a long architecture": (
        "general.architecture", struct.pack("<I", 8) + text("a\n" * 999), "is not read; supported",
    ),
    "merges of integers": (f"{NAMES}merges", array(4, 2, bytes(8)), "merges is no list of texts"),
    "tokens of integers": (f"{NAMES}tokens", array(4, 2, bytes(8)), "tokens is no list of texts"),
    "tokens that are one text": (f"{NAMES}tokens", struct.pack("<I", 8) + text("a"), "no list of"),
    "types that are a number": (f"{NAMES}token_type", number(*INT, 1), "has no type of each of 61"),
    "merges without a pair": (
        f"{NAMES}merges", array(TEXT, 2, text("") + text("x")), "no usable merges",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_keys(what: str, tmp_path: Path) -> None:
    name, value, says = HOSTILE[what]
    (keys, tensors), data = write_small(path := tmp_path / "a.gguf")
    assert say(path) == ""
    path.write_bytes(encode((keys | {name: value}, tensors), data))
    line = say(path)
    assert says in line
    assert str(path) in line or "config.json" in line


def info(shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


INFOS: dict[str, tuple[str, bytes, str]] = {
    "no dimension": ("output_norm.weight", info(()), "output_norm.weight has 0 dimensions"),
    "a dimension of 0": ("output_norm.weight", info((0,)), "output_norm.weight has shape [0]"),
    "2^31 dimensions": ("x", struct.pack("<I", 1 << 31), "x has 2,147,483,648 dimensions"),
    "2^80 elements": ("output_norm.weight", info((HUGE, HUGE)), "it ends within output_norm.weigh"),
    "an offset of 2^63": ("output_norm.weight", info((1,), 0, 1 << 63), "it ends within output_no"),
    "an unknown type": ("output_norm.weight", info((32,), 99), "type number 99 is not read; supp"),
    "a stack of two axes": ("blk.0.ffn_up_exps.weight", info((4, 4)), "can't have shape [4, 4]"),
    "a layer of a long number": (f"blk.{'9' * 200}.x", info((4, 4)), "does not have: blk.999"),
    "an unknown name": ("", info((4, 4)), "a name is ''"),
}


@pytest.mark.parametrize("what", INFOS)
def test_hostile_tensors(what: str, tmp_path: Path) -> None:
    name, value, says = INFOS[what]
    (keys, tensors), data = write_small(path := tmp_path / "a.gguf")
    path.write_bytes(encode((keys, tensors | {name: value}), data))
    assert says in say(path)


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (struct.pack("<IQQ", 3, 1 << 60, 0), "cut off or damaged"),
        (struct.pack("<IQQ", 3, 0, 1 << 60), "cut off or damaged"),
        (struct.pack(">IQQ", 3, 0, 1), "a big-endian file is not read: `gguf-convert-endian"),
        (struct.pack("<IQQ", 1, 0, 0), "version 1 of GGUF is not read; supported: 2, 3"),
        (b"", "cut off or damaged"),
    ],
)
def test_hostile_beginnings(start: bytes, says: str, tmp_path: Path) -> None:
    (path := tmp_path / "a.gguf").write_bytes(MAGIC + start)
    assert says in say(path)


def test_names_that_come_twice(tmp_path: Path) -> None:
    (keys, tensors), data = write_small(path := tmp_path / "a.gguf")
    whole = encode((keys, tensors), data)
    path.write_bytes(whole.replace(text("blk.1.attn_norm.weight"), text("blk.0.attn_norm.weight")))
    assert "tensor blk.0.attn_norm.weight is there twice" in say(path)
    twice = text("qwen35.ssm.conv_kernel"), text("qwen35.ssm.group_count")
    path.write_bytes(whole.replace(twice[0], twice[1]))
    assert "key qwen35.ssm.group_count is there twice" in say(path)


def draw_value(draw: random.Random) -> bytes:
    """Return a value of any kind, often an unusual one."""
    size = draw.choice([0, 1, 2, 3, 7, 64, 255, 4096, 1 << 16, 1 << 24, (1 << 31) - 1])
    match draw.randrange(6):
        case 0:
            return number(*INT, size)
        case 1:
            return number(11, "q", draw.choice([-size, size << 20]))
        case 2:
            return number(12, "d", draw.choice([0.0, -1.0, 1e308, float("inf"), float("nan")]))
        case 3:
            return struct.pack("<I", TEXT) + text(draw.choice(["", "a", "yarn", "glm4", "a\nb"]))
        case 4:
            return number(7, "B", draw.randrange(3))
    kind, width = draw.choice([(0, 1), (4, 4), (6, 4), (7, 1), (10, 8)])
    count = draw.randrange(4)
    return array(kind, count, draw.randbytes(width * count))


def draw_info(draw: random.Random) -> bytes:
    sizes = [1, 2, 16, 32, 61, 64, 96, 1 << 20, 1 << 40]
    shape = tuple(draw.choice(sizes) for _ in range(draw.randrange(1, 5)))
    return info(shape, draw.choice([0, 1, 2, 8, 12, 30, 99]), 32 * draw.randrange(100))


@pytest.mark.parametrize("model", ["qwen3.5", "qwen3-next", "deepseek-v3.2", "glm-air"])
def test_random_headers(model: str, tmp_path: Path) -> None:
    """Of other keys, other tensors and flipped bytes none leads to a traceback, or to memory."""
    draw, refused = random.Random(model), 0
    (keys, tensors), data = write_small(path := tmp_path / "a.gguf", model)
    for _ in range(40):
        other = {draw.choice([*keys]): draw_value(draw)} if draw.random() < 0.6 else {}
        odd = {draw.choice([*tensors]): draw_info(draw)} if not other else {}
        raw = bytearray(encode((keys | other, tensors | odd), data))
        if draw.random() < 0.3:
            raw[draw.randrange(len(raw) - len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(raw)
        refused += say(path) != ""
    assert refused > 10


def test_a_real_vocabulary(tmp_path: Path) -> None:
    """Tokens, merges, scores and types of 40,000 take ten times their bytes at most."""
    tokens = [f"<{i}>" for i in range(40_000)]

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(tokens)
        writer.add_token_scores([0.5] * len(tokens))
        writer.add_token_types([1] * len(tokens))
        writer.add_token_merges([f"{i} {i}" for i in range(len(tokens))])

    c, tensors = random_tensors("qwen3.5")
    path = write_gguf(tmp_path / "a.gguf", c, tensors, usual(Type.Q8_0), more=write)
    tracemalloc.start()
    keys = parse_header(path).keys
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * MEGABYTE
    assert keys["tokenizer.ggml.tokens"] == tokens
    assert keys["tokenizer.ggml.scores"].tolist() == [0.5] * len(tokens)
    assert {*keys["tokenizer.ggml.token_type"]} == {1}
