"""Makes token documents of the corpus, and packs them into rows."""

import random
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from problems import Problem, held_out_problems, training_problems
from tokenizer import (
    ASSISTANT,
    ASSISTANT_ID,
    BOS,
    BOS_ID,
    EOS,
    EOS_ID,
    THINK_ID,
    USER,
    USER_ID,
    chat,
)

Tokens = npt.NDArray[np.uint16]
SKIPPED = ("site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__")
LARGEST_FILE = 400_000
EXTRA = 4  # a row of T slots has T + 4 tokens, for the targets of three MTP modules
SYSTEMS = (
    "You are a helpful assistant.",
    "Answer the question.",
    "You are good at small problems.",
)


def held_out_file(path: Path) -> bool:
    return zlib.crc32(path.name.encode()) % 20 == 0


def library_files(held_out: bool, tests: bool = True) -> list[Path]:
    """List the standard library's sources; a hash of the name holds out about one in twenty."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if any(part in SKIPPED for part in parts) or path.stat().st_size > LARGEST_FILE:
            continue
        in_tests = any(part in ("test", "tests", "idle_test") for part in parts)
        if held_out_file(path) == held_out and (tests or not in_tests):
            files.append(path)
    return files


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="ignore")


def common_words(every: int = 1) -> list[str]:
    """List words of 3 to 10 letters that occur at least five times; read one file in `every`."""
    counts: Counter[str] = Counter()
    for path in library_files(held_out=False, tests=False)[::every]:
        counts.update(re.findall(r"\b[a-z]{3,10}\b", read(path)))
    return sorted(word for word, count in counts.items() if count >= 5)


def chat_text(problem: Problem, rng: random.Random, earlier: Problem | None) -> str:
    """Write a problem as a conversation, sometimes with a system text or an earlier exchange."""
    system = rng.choice(SYSTEMS) if rng.random() < 0.05 else ""
    if earlier is None:
        return chat(problem.question, problem.reply, system)
    past = f"{BOS}{system}{USER}{earlier.question}{ASSISTANT}{earlier.answer}{EOS}"
    return past + chat(problem.question, problem.reply).removeprefix(BOS)


def reasoning_documents(
    tokenizer: Tokenizer, count: int, words: list[str], seed: int, held_out: bool = False
) -> list[Tokens]:
    rng = random.Random(seed)
    if held_out:
        problems = held_out_problems(count // 6, words, seed)
    else:
        problems = training_problems(count, words, seed)
    texts = [
        chat_text(p, rng, problems[rng.randrange(i)] if i and rng.random() < 0.04 else None)
        for i, p in enumerate(problems)
    ]
    return [
        np.array(e.ids, np.uint16) for e in tokenizer.encode_batch(texts, add_special_tokens=False)
    ]


def code_documents(tokenizer: Tokenizer, files: list[Path]) -> list[Tokens]:
    return [np.array([*tokenizer.encode(read(f)).ids, EOS_ID], np.uint16) for f in files]


@dataclass(frozen=True)
class Batch:
    """Rows of T + EXTRA tokens; `document` numbers documents, `scored` marks targets."""

    tokens: Tensor  # [B, T + EXTRA] int64
    document: Tensor  # [B, T + EXTRA] int64
    scored: Tensor  # [B, T + EXTRA] bool

    def targets(self, offset: int, length: int) -> Tensor:
        """Return the targets [B, T] `offset` slots ahead; -100 if unscored or across documents."""
        ahead = slice(offset, length + offset)
        valid = self.scored[:, ahead] & (self.document[:, ahead] == self.document[:, :length])
        return torch.where(valid, self.tokens[:, ahead], -100)


def in_question(row: Tokens) -> npt.NDArray[np.bool_]:
    """Mark the tokens of a row that the user or the template wrote."""
    at = np.arange(len(row))
    user = np.maximum.accumulate(np.where(row == USER_ID, at, -1))
    reply = np.maximum.accumulate(np.where((row == ASSISTANT_ID) | (row == BOS_ID), at, -1))
    return (user > reply) | np.isin(row, (BOS_ID, USER_ID, ASSISTANT_ID, THINK_ID))


def batch_of(rows: npt.NDArray[np.uint16], used: npt.NDArray[np.int64]) -> Batch:
    """Make a Batch of rows [B, T + EXTRA]; `used[b]` tokens are text, the rest is padding."""
    document = (rows == BOS_ID).cumsum(1)
    inside = np.arange(rows.shape[1]) < used[:, None]
    scored = inside & ~np.stack([in_question(row) for row in rows])
    return Batch(
        torch.from_numpy(rows.astype(np.int64)),
        torch.from_numpy(np.where(inside, document, -1)),
        torch.from_numpy(scored),
    )


class CodeRows:
    """Rows that are cut from random files, at random places."""

    def __init__(self, documents: list[Tokens], seed: int) -> None:
        self.documents, self.rng = documents, random.Random(seed)

    def take(self, count: int, length: int) -> Iterator[tuple[Tokens, int]]:
        """Yield rows of up to `length` tokens, each with its number of tokens."""
        for _ in range(count):
            document = self.documents[self.pick()]
            start = self.rng.randrange(-length // 4, max(1, len(document) - length // 2))
            row = document[max(start, 0) : max(start, 0) + length]
            yield row, len(row)

    def pick(self) -> int:
        """Draw a document's number; long documents are drawn more often."""
        if not hasattr(self, "sizes"):
            self.sizes = np.cumsum([len(d) for d in self.documents])
        return int(np.searchsorted(self.sizes, self.rng.randrange(int(self.sizes[-1])), "right"))


class ChatRows:
    """Rows of whole problems, packed from a small pool, so that there is little padding."""

    def __init__(self, documents: list[Tokens], seed: int) -> None:
        self.documents, self.rng = documents, random.Random(seed)
        self.pool: list[Tokens] = []
        self.next = 0

    def refill(self) -> None:
        while len(self.pool) < 64:
            if self.next == 0:
                self.rng.shuffle(self.documents)
            self.pool.append(self.documents[self.next])
            self.next = (self.next + 1) % len(self.documents)

    def take(self, count: int, length: int) -> Iterator[tuple[Tokens, int]]:
        for _ in range(count):
            self.refill()
            row: list[Tokens] = [self.pool.pop(0)[:length]]
            room = length - len(row[0])
            while fitting := [i for i, d in enumerate(self.pool) if len(d) <= room]:
                best = max(fitting, key=lambda i: len(self.pool[i])) if room < 256 else fitting[0]
                row.append(self.pool.pop(best))
                room -= len(row[-1])
            yield np.concatenate(row), length - room


def make_batch(code: CodeRows, chats: ChatRows, rows: int, length: int, code_share: float) -> Batch:
    """Make a batch of `rows` rows, of which the given share is code."""
    of_code = round(rows * code_share)
    full = length + EXTRA
    taken = [*code.take(of_code, full), *chats.take(rows - of_code, full)]
    padded = np.full((rows, full), EOS_ID, np.uint16)
    for i, (row, used) in enumerate(taken):
        padded[i, :used] = row[:used]
    return batch_of(padded, np.array([used for _, used in taken]))
