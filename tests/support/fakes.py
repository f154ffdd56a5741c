"""Fakes of programs, without weights, with their manifest and a small real tokenizer."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from mtpbuild.runtime import Engine
from mtpbuild.runtime.contract.controls import GREEDY, MAX_LOGPROBS, StepControls
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import BuildInfo, Manifest, ModelInfo, TargetInfo
from mtpbuild.runtime.contract.programs import Bools, Constraint, Ints, Piece, StepOutput
from mtpbuild.runtime.contract.state import make_rows_spec
from mtpbuild.runtime.prefix_cache.cache import PrefixCache
from mtpbuild.runtime.text.chat_template import ChatTemplates, TemplateText
from mtpbuild.runtime.text.tokenizer import Tokenizer

BOS, EOS = 0, 1
THINKING = 298, 299  # `<think>` and `</think>` of the tokenizer
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no role ' + m.role) }}"
    "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

NextToken = Callable[[Sequence[int]], int]


def fake_manifest(
    *,
    nextn: int = 3,
    max_batch: int = 1,
    max_seq_len: int = 64,
    prefill_chunk: int = 4,
    vocab_size: int = 320,
    eos: tuple[int, ...] = (EOS,),
    lookahead: int = 1,
    ranks: int = 1,
    width: int = 0,
) -> Manifest:
    """Make a manifest; `ranks` counts the ranks that have requests of their own.

    width: of the only cache's rows; 0: there is none.
    """
    capacity = max_seq_len + nextn + 1
    rows = make_rows_spec("kv.0", "layers.0", "float32", (max_batch, 1, capacity, width))
    return Manifest(
        mtpbuild="0",
        model=ModelInfo(
            name="fake",
            architecture="DeepseekV3ForCausalLM",
            parameters=0,
            vocab_size=vocab_size,
            num_hidden_layers=1,
            num_nextn_predict_layers=1,
            max_position_embeddings=max_seq_len,
            bos_token_id=BOS,
            eos_token_ids=eos,
            thinking_token_ids=THINKING,
        ),
        build=BuildInfo(
            nextn=nextn,
            drafter="mtp-eagle" if nextn else None,
            max_batch=max_batch,
            max_seq_len=max_seq_len,
            capacity=capacity,
            prefill_chunk=prefill_chunk,
            weights="float32",
            fingerprint="0",
            tp=ranks,
            attention_dp=ranks > 1,
        ),
        target=TargetInfo(name="onnxruntime", hardware="cpu", versions={}),
        capabilities={},
        lookahead=lookahead,
        programs={},
        state=(rows,) if width else (),
        files={},
    )


def mixed(history: Sequence[int]) -> int:
    """Choose a next token that depends on every token and its place; never a special one."""
    return 2 + sum((i + 1) * t for i, t in enumerate(history)) % 250


def scripted(prompt_length: int, tokens: Sequence[int]) -> NextToken:
    """Make a NextToken that repeats `tokens` after any prompt of that length."""
    return lambda history: tokens[(len(history) - prompt_length) % len(tokens)]


def continuation(prompt: Sequence[int], count: int, next_token: NextToken = mixed) -> list[int]:
    """Return the tokens of plain decoding, one token at a time."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) :]


class FakePrograms:
    """Emits the tokens of `next_token`; `draft_is_right` decides by a draft's absolute position.

    It checks the loop's promises: chunks in order and of the right size, the tokens after a chunk,
    enough rows, no missing row of a prefix, no gap below a running slot of a rank, and no move to
    another rank.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        next_token: NextToken = mixed,
        draft_is_right: Callable[[int], bool] = lambda position: True,
        step_s: float = 0.0,
    ) -> None:
        self.lookahead, self.features = manifest.lookahead, manifest.features
        self.next_token, self.draft_is_right, self.step_s = next_token, draft_is_right, step_s
        self.build, self.window = manifest.build, manifest.window
        self.capacity = manifest.build.max_seq_len + manifest.window  # cache rows
        B = manifest.build.slots
        self.history: list[list[int]] = [[] for _ in range(B)]  # all known tokens of a slot
        self.pending: list[list[int]] = [[] for _ in range(B)]  # a slot's drafts
        self.controls = [GREEDY] * B
        self.chunks: list[tuple[int, int, list[int]]] = []  # slot, start, tokens with lookahead
        self.slots: list[int] = []  # computed by each step, on the fullest rank
        self.moves: list[tuple[int, int]] = []
        self.saved_rows: dict[int, list[int]] = {}  # a slot's tokens, by number
        self.most_saved = 0  # rows at any time
        self.turns: list[str] = []  # c for a chunk, s for a step
        self.told: list[int] = []  # each nextn that an adaptive engine's loop chose
        self.cleared: list[int] = []  # slots
        self.damage = -1  # a slot that knows this token has logits of NaN
        self.steps = 0  # of decoding
        self.fail: BaseException | None = None  # the next step raises it

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        assert tokens.dtype == np.int64
        count = len(tokens) - self.lookahead
        assert 1 <= count <= self.build.prefill_chunk
        self.history[slot] = self.history[slot][:start]
        assert len(self.history[slot]) == start, "chunks come in order"
        self.turns.append("c")
        self.chunks.append((slot, start, tokens.tolist()))
        self.history[slot] += tokens.tolist()[:count]

    def begin(self, slot: int, length: int, newest: int, controls: StepControls = GREEDY) -> None:
        self.controls[slot] = controls
        self.history[slot] = [*self.history[slot][:length], newest]
        self.pending[slot] = []

    def move(self, source: int, target: int) -> None:
        self.moves.append((source, target))
        assert source // self.build.max_batch == target // self.build.max_batch
        self.history[target], self.history[source] = self.history[source], []
        self.pending[target], self.pending[source] = self.pending[source], []
        self.controls[target] = self.controls[source]

    def finite(self, slot: int, rows: int) -> bool:
        return self.damage not in self.history[slot][:rows]

    def clear(self, slot: int) -> None:
        self.cleared.append(slot)
        self.history[slot] = []

    def save_rows(self, slot: int, start: int, pieces: Sequence[Piece]) -> bool:
        rows = self.history[slot][start : start + sum(count for _, count in pieces)]
        if self.damage in rows:
            return False
        for number, count in pieces:
            assert number not in self.saved_rows
            assert 0 < count <= len(rows)
            self.saved_rows[number], rows = rows[:count], rows[count:]
        self.most_saved = max(self.most_saved, sum(map(len, self.saved_rows.values())))
        return True

    def load_rows(self, slot: int, pieces: Sequence[Piece]) -> None:
        rows = (self.saved_rows[number][:count] for number, count in pieces)
        self.history[slot] = [token for piece in rows for token in piece]

    def discard(self, number: int) -> None:
        self.saved_rows.pop(number, None)

    def save_states(self, slot: int, number: int) -> bool:
        raise AssertionError("there are no recurrent states")

    def load_states(self, slot: int, number: int) -> None:
        raise AssertionError("there are no recurrent states")

    def saved(self, number: int) -> Mapping[str, NDArray[Any]]:
        return {"kv.0": np.array(self.saved_rows[number], np.float32)[:, None]}

    def adopt(self, number: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.saved_rows[number] = arrays["kv.0"][:, 0].astype(int).tolist()

    def draft(self, nextn: int) -> None:
        self.told.append(nextn)
        self.window = nextn + 1
        self.pending = [drafts[:nextn] for drafts in self.pending]

    def drafts(self, slot: int) -> list[int]:
        return self.pending[slot]

    def constrain(self, slot: int, constraint: Constraint) -> None:
        self.propose(slot, constraint.drafts, constraint.kept)

    def propose(self, slot: int, drafts: Sequence[int], kept: int = 0) -> None:
        self.pending[slot][kept:] = drafts[kept:]

    def step(self, active: Bools, rows: int) -> StepOutput:
        if self.fail:
            raise self.fail
        time.sleep(self.step_s)
        self.steps += 1
        self.turns.append("s")
        B, T = len(self.history), self.window
        assert active.shape == (B,)
        ranks = active.reshape(self.build.ranks.serving, -1)
        self.slots.append(int(ranks.sum(1).max()))
        for rank in ranks:
            assert rank[: rank.sum()].all(), "running slots are the lowest"
        assert rows <= self.capacity
        tokens, window = np.full((B, T), -1), np.zeros((B, T), np.int64)
        counts, num_drafts = np.zeros(B, np.int64), np.zeros(B, np.int64)
        logprobs, margins = np.zeros((2, B, T), np.float32)
        for b in np.flatnonzero(active).tolist():
            assert rows >= len(self.history[b]) - 1 + T, "rows must bound every active slot"
            num_drafts[b] = len(self.pending[b])
            window[b, : num_drafts[b] + 1] = [self.history[b][-1], *self.pending[b]]
            emitted = self._accept(b)
            counts[b] = n = len(emitted)
            tokens[b, :n], logprobs[b, :n], margins[b, :n] = zip(*emitted, strict=True)
            if self.damage in self.history[b]:
                logprobs[b] = np.nan
        top_ids = tokens[..., None] + np.arange(MAX_LOGPROBS)  # the token and the ones after it
        top = np.broadcast_to(-np.arange(MAX_LOGPROBS, dtype=np.float32), top_ids.shape)
        # An accepted draft is the most probable token, any other one the second.
        draft_ranks = 2 - (np.arange(T) < counts[:, None] - 1).astype(np.int64)
        judged = tokens, counts, window, num_drafts, logprobs, margins, top_ids, top
        q = np.full((B, T), 0.25, np.float32)
        return StepOutput(*judged, -draft_ranks.astype(np.float32), draft_ranks, q)

    def _accept(self, b: int) -> list[tuple[int, float, float]]:
        """Judge and make a slot's drafts; return tokens, log-probabilities and margins."""
        history, emitted = self.history[b], []
        for draft in [*self.pending[b], None]:
            emitted.append((self.next_token(history), 0.0, 0.0))
            history.append(emitted[-1][0])
            if history[-1] != draft:
                break
        guess = list(history)
        for _ in range(self.window - 1):
            right = self.next_token(guess)
            wrong = (right + 1) % 250
            guess.append(right if self.draft_is_right(len(guess)) else wrong)
        self.pending[b] = guess[len(history) :]
        return emitted


class LaggingPrograms(FakePrograms):
    """Programs like a device's: a step changes slots at its launch; its tokens can be read later.

    The newest two launched steps can be read, in order; the arrays of older ones hold garbage.
    `most_unread` is the largest number of unread steps; reading a step raises `fail_landing`.
    """

    def __init__(self, manifest: Manifest, **settings: Any) -> None:
        super().__init__(manifest, **settings)
        self.features |= {Feature.OVERLAP}
        self.capacity += manifest.window
        self.unread: list[StepOutput] = []
        self.most_unread = 0
        self.fail_landing: BaseException | None = None

    def step(self, active: Bools, rows: int) -> StepOutput:
        return self.launch(active, rows)()

    def launch(self, active: Bools, rows: int) -> Callable[[], StepOutput]:
        output = super().step(active, rows)
        self.unread.append(output)
        self.most_unread = max(self.most_unread, len(self.unread))
        if len(self.unread) > 2:
            spoilt = self.unread.pop(0)
            spoilt.tokens[:] = spoilt.num_tokens[:] = 99

        def land() -> StepOutput:
            if self.fail_landing:
                self.unread.clear()  # nothing that was launched before can be read
                raise self.fail_landing
            assert any(output is other for other in self.unread), "too late, or out of order"
            while self.unread.pop(0) is not output:
                pass
            return output

        return land


def backend_tokenizer() -> tokenizers.Tokenizer:
    """Train a byte-level BPE like DeepSeek's on a few words; it adds the BOS."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["def hello(world): return 1 + 2  # größer, 你好, 🙂"] * 3, trainer)
    backend.add_tokens(["<think>", "</think>", "｜end｜"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return backend


def fake_tokenizer(backend: tokenizers.Tokenizer | None = None) -> Tokenizer:
    return Tokenizer(
        backend or backend_tokenizer(),
        chat_template=ChatTemplates(
            {"default": TemplateText("chat_template.jinja", TEMPLATE)},
            {"bos_token": "<s>", "eos_token": "</s>"},
        ),
        bos_token="<s>",
    )


@cache
def shared_tokenizer() -> Tokenizer:
    return fake_tokenizer()


def fake_engine(
    tokenizer: Tokenizer | None = None,
    *,
    limit: int | None = None,
    next_token: NextToken = mixed,
    draft_is_right: Callable[[int], bool] = lambda position: True,
    step_s: float = 0.0,
    chunked_prefill_size: int | None = None,
    **sizes: Any,
) -> tuple[Engine, FakePrograms]:
    """Make an engine over fake programs; returns them too. `sizes` are those of its manifest.

    limit: bytes of its prefix cache; None: it has none.
    """
    manifest = fake_manifest(**sizes)
    programs = FakePrograms(
        manifest, next_token=next_token, draft_is_right=draft_is_right, step_s=step_s
    )
    pool = None if limit is None else PrefixCache(programs, manifest, limit)
    engine = Engine(
        programs,
        manifest,
        tokenizer or shared_tokenizer(),
        prefix_cache=pool,
        chunked_prefill_size=chunked_prefill_size,
    )
    return engine, programs
