"""Grammars of requests: the tokens that each step may emit, and the tokens that must come next.

llguidance parses the grammars. It is imported when the first request with a grammar arrives.
"""

import threading
from collections.abc import Sequence
from functools import lru_cache
from json import dumps
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mtpbuild.runtime.constraints.form_limits import check_form
from mtpbuild.runtime.constraints.token_limits import TokenLimits
from mtpbuild.runtime.contract.controls import WORD, StepControls
from mtpbuild.runtime.contract.features import Feature, Features
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import Constraint, Words
from mtpbuild.runtime.contract.targets import list_targets_with
from mtpbuild.runtime.errors import RequestError, explain_missing_package
from mtpbuild.runtime.sampling.params import SamplingParams
from mtpbuild.runtime.sampling.structured_outputs import StructuredOutputs, make_form_error
from mtpbuild.runtime.text.tokenizer import Tokenizer
from mtpbuild.runtime.threads import call_with_stack

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LEXER_STATES = 50_000  # limit; a state has 1 to 2 kB
KEPT = 16  # compiled grammars in the cache
PROBED = 64  # states of a grammar in which an answer is looked for
STACK = 256 * 1024 * 1024  # bytes, used on demand: llguidance recurses into nested rules


class Grammar(Protocol):
    """The interface of a request's grammar for the loop."""

    kept: int  # drafts at the start of the last constraint that the grammar did not force

    def make_next_constraint(self, drafts: Sequence[int]) -> Constraint:
        """Return the constraint of the next step, which verifies these drafts; change nothing.

        Raises RequestError if the grammar has become too costly to follow.
        """

    def take(self, token: int) -> None:
        """Advance by an emitted token; raise RequestError if it is not allowed."""


class GrammarMatcher:
    """A grammar, advanced to the end of its request's tokens; for one thread at a time.

    The grammar begins after the token that ends the thought. Before that only the tokens that end
    the answer are forbidden.
    """

    def __init__(
        self,
        matcher: "LLMatcher",
        end_ids: Sequence[int],
        window: int,
        words: int,
        controls: StepControls,
    ) -> None:
        self._matcher, self._end_ids = matcher, end_ids
        self._shape = window, words
        self._thinking, self._end_of_thought = controls.thinking, controls.thinking_ids[1]
        in_thought = np.full(words, -1, np.int32)
        for id in end_ids:
            in_thought.view(np.uint32)[id // WORD] &= ~np.uint32(1 << id % WORD)
        self._in_thought = in_thought
        self.kept = 0

    def make_next_constraint(self, drafts: Sequence[int]) -> Constraint:
        """Return a mask for each draft; forced tokens replace drafts that are forbidden.

        Forced tokens begin at the first forbidden draft, or after the last draft. If nothing is
        forced, a forbidden draft stays, because rejection needs the distribution that it was
        sampled from. It is never accepted, so the rows after it have no mask.
        """
        from llguidance.numpy import fill_next_token_bitmask

        matcher, thinking, tokens, followed = self._matcher, self._thinking, list(drafts), 0
        allowed = np.full(self._shape, -1, np.int32)
        last = len(allowed) - 1
        self.kept = len(tokens)
        for row in range(len(allowed)):
            if thinking:
                allowed[row] = self._in_thought
            else:
                fill_next_token_bitmask(matcher, allowed, row)
                if row < last and (
                    row == len(tokens) or not _is_allowed(allowed, row, tokens[row])
                ):
                    forced = self._find_forced()[: last - row]
                    if not forced:
                        break
                    self.kept = min(self.kept, row)
                    tokens[row:] = forced
            if row >= len(tokens) or tokens[row] in self._end_ids:
                break
            if thinking:
                thinking = tokens[row] != self._end_of_thought
            else:
                matcher.consume_token(tokens[row])
                followed += 1
        if followed:
            matcher.rollback(followed)
        self._check()
        return Constraint(tokens, self.kept, allowed)

    def take(self, token: int) -> None:
        if self._thinking:
            self._thinking = token != self._end_of_thought
        else:
            self._matcher.consume_token(token)
            self._check()

    def _find_forced(self) -> list[int]:
        """Return the tokens that must come next; [] if several tokens may."""
        if self._matcher.is_stopped():
            return [*self._end_ids] if len(self._end_ids) == 1 else []
        return self._matcher.compute_ff_tokens()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise make_form_error("no token can follow this answer, or the form is too complex")


class GrammarTokens:
    """A tokenizer for grammars, with the interface of llguidance's `TokenizerWrapper`.

    Marks are special tokens and added tokens that look like `<this>`. A grammar names them as
    `<this>` or by id. The same characters in a form's text are spelled with ordinary tokens.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        """Read the vocabulary; end_ids: the tokens that end an answer."""
        self._tokenizer = tokenizer
        self.eos_token_id = end_ids[0]
        marks = {
            id: text
            for text, id in tokenizer.added_tokens.items()
            if not tokenizer.decode_token(id) or (text[:1], text[-1:]) == ("<", ">")
        }
        texts = [b"" if id in marks else tokenizer.decode_token(id) for id in range(vocab_size)]
        self.special_token_ids = [id for id, text in enumerate(texts) if not text]
        for id in self.special_token_ids:  # the model's vocabulary may be padded
            texts[id] = marks.get(id, f"<[{id}]>").encode()
        self.tokens = texts

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.spell(text)


class Grammars:
    """The compiler and cache of the grammars of an engine's requests; usable from any thread."""

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer | None, features: Features) -> None:
        """Set up for one engine; features: those of the engine's programs."""
        self._manifest, self._tokenizer = manifest, tokenizer
        self._supported = Feature.CONSTRAIN in features
        self._copying = threading.Lock()  # for `deep_copy`, as a matcher has one user at a time
        self._vocabulary: LLTokenizer | None = None
        self._compiled = lru_cache(KEPT)(lambda form: call_with_stack(STACK, self._compile, form))

    def make_grammar(self, params: SamplingParams, controls: StepControls) -> Grammar | None:
        """Return the grammar of a request; None if it needs none. Raises what `matcher` raises."""
        if params.structured_outputs is not None:
            return self.matcher(params.structured_outputs, controls)
        if not params.constraint:
            return None
        self._check_supported(params.constraint)
        return TokenLimits(params, self._manifest, self._tokenizer)

    def matcher(self, form: StructuredOutputs, controls: StepControls) -> GrammarMatcher:
        """Return a matcher at the start of a grammar.

        Raises RequestError if the engine has no constraints or cannot follow this grammar,
        MissingDependencyError without llguidance.
        """
        model = self._manifest.model
        self._check_supported("structured_outputs")
        if self._tokenizer is None:
            raise make_form_error("this engine was built without a tokenizer")
        if not model.eos_token_ids:
            raise make_form_error("the model has no token that ends an answer")
        compiled = self._compiled(form)  # outside the lock: it may take a second
        with self._copying:
            copy = compiled.deep_copy()
        words = -(-model.vocab_size // WORD)
        return GrammarMatcher(copy, model.eos_token_ids, self._manifest.window, words, controls)

    def _check_supported(self, setting: str) -> None:
        if not self._supported:
            advice = f"build it anew for target {list_targets_with(Feature.CONSTRAIN)}"
            raise RequestError(f"{setting}: this engine's steps take no grammar; {advice}", setting)

    def _compile(self, form: StructuredOutputs) -> "LLMatcher":
        with explain_missing_package("a request with structured_outputs", "serve"):
            import llguidance
        if self._vocabulary is None:
            assert self._tokenizer is not None
            model = self._manifest.model
            end_ids = list(model.eos_token_ids)
            tokens: Any = GrammarTokens(self._tokenizer, model.vocab_size, end_ids)
            self._vocabulary = llguidance.LLTokenizer(tokens, eos_token=end_ids)
        limits = llguidance.LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)
        source = _write_source(form)
        matcher = llguidance.LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise make_form_error(_cut_to_one_line(matcher.get_error()))
        if not may_be_satisfied(matcher, -(-self._manifest.model.vocab_size // WORD)):
            raise make_form_error("no answer satisfies this form, or it is too complex")
        return matcher


def may_be_satisfied(matcher: "LLMatcher", words: int) -> bool:
    """Return False if no tokens satisfy a grammar; True if `PROBED` states do not tell.

    words: of a mask of the vocabulary.
    """
    from llguidance.numpy import fill_next_token_bitmask

    pending, mask = [(matcher, list[int]())], np.zeros((1, words), np.int32)
    for _ in range(PROBED):
        if not pending:
            return False
        state, tokens = pending.pop()
        state = state.deep_copy()
        state.consume_tokens(tokens)
        state.consume_tokens(state.compute_ff_tokens())
        if state.is_accepting():
            return True
        fill_next_token_bitmask(state, mask, 0)
        if not state.is_error():
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            pending += [(state, [int(token)]) for token in allowed[:PROBED]]
    return True


def _write_source(form: StructuredOutputs) -> str:
    """Return the form in llguidance's format; raise RequestError if it is too large or invalid."""
    from llguidance import GrammarFormat, LLMatcher, grammar_from

    forms: dict[GrammarFormat, object] = {
        "json": '{"type": "object"}' if form.json_object else form.json,
        "regex": form.regex,
        "choice": None if form.choice is None else dumps(form.choice),
        "grammar": form.grammar,
    }
    ((kind, text),) = ((kind, text) for kind, text in forms.items() if text is not None)
    assert isinstance(text, str)
    check_form(kind, text)
    try:
        if kind == "json":
            # Imported here, as few engines get schemas, and all load sooner.
            from mtpbuild.runtime.constraints.json_schema import prepare_schema

            return LLMatcher.grammar_from_json_schema(dumps(prepare_schema(text)))
        return grammar_from(kind, text)
    except (ValueError, OverflowError, RecursionError) as error:
        raise make_form_error(_cut_to_one_line(str(error))) from None


def _is_allowed(mask: Words, row: int, token: int) -> bool:
    return bool(mask[row, token // WORD] >> (token % WORD) & 1)


def _cut_to_one_line(text: str) -> str:
    """Return the start of a message, which may quote a grammar, in one line."""
    return " ".join(text.split())[:300]
