"""`allowed_token_ids` and `bad_words`: deepseek-tiny under them, beside plain decoding."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.runtime import Engine, RequestError, SamplingParams, StructuredOutputs
from mtpbuild.runtime.constraints.grammar import Grammars
from mtpbuild.runtime.constraints.token_limits import TokenLimits, encode_bad_word
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.text.tokenizer import Tokenizer, read_backend
from tests.support.fakes import fake_manifest
from tests.support.live_server import live

pytestmark = pytest.mark.xdist_group("tiny")
EOS, VOCABULARY = 1, 2048
CODE = "def f("
SUM: Any = [{"role": "user", "content": "What is 47 + 85?"}]
SETTINGS: tuple[dict[str, Any], ...] = (
    {"bad_words": ["self", "return", "the", "carry"]},
    {"bad_words": ["write 2", "from the right", "carry 1\ntens", "is 132"]},
    {"allowed_token_ids": [EOS, *range(16, VOCABULARY, 3)]},
    {"allowed_token_ids": list(range(16, 900)), "bad_words": ["ones:", "+ 5", "self, x"]},
)
MODES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.0, "seed": 5, "acceptance": "rejection"},
    {"temperature": 1.0, "seed": 5, "acceptance": "rejection", "rejection_sample_method": "block"},
)


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[httpx2.Client]:
    with live(engine) as server, server.client() as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(read_backend(find_model("deepseek-tiny").folder / "tokenizer.json"))


def manifest(nextn: int = 3) -> Manifest:
    return fake_manifest(nextn=nextn, vocab_size=VOCABULARY, eos=(EOS,))


def broken(ids: list[int], params: SamplingParams, tokenizer: Tokenizer) -> bool:
    """Whether an answer has a token or a text that it must not have."""
    allowed = params.allowed_token_ids
    if allowed is not None and not set(ids) <= set(allowed):
        return True
    bad = [found for text in params.bad_words for found in encode_bad_word(text, tokenizer)]
    return any(ids[i : i + len(b)] == b for b in bad for i in range(len(ids)))


def test_the_text_is_that_of_the_engine_without_drafts(
    engine: Engine, tiny_engine: Callable[..., Path], tokenizer: Tokenizer
) -> None:
    """It keeps to the limits, which without them it would break; some drafts are accepted."""
    strict = [SamplingParams(40, **mode, **more) for more in SETTINGS for mode in MODES[:2]]
    prompts: list[Any] = [CODE, engine.chat_ids(SUM)]
    with Engine.load(tiny_engine(0), threads=1) as plain:
        for prompt in prompts:
            got = engine.generate([prompt] * len(strict), strict)
            assert [one.token_ids for one in got] == [
                plain.generate(prompt, params).token_ids for params in strict
            ]
            for one, params in zip(got, strict, strict=True):
                assert not broken(one.token_ids, params, tokenizer)
            accepted = [one.metrics.speculative_decoding.num_accepted_draft_tokens for one in got]
            assert min(accepted) > 0
    free = [engine.generate(prompt, SamplingParams(40)).token_ids for prompt in prompts]
    assert all(any(broken(ids, params, tokenizer) for ids in free) for params in strict)


@pytest.mark.parametrize("mode", MODES[2:], ids=["rejection", "block"])
def test_other_rules_keep_to_the_limits(
    mode: dict[str, Any], engine: Engine, tokenizer: Tokenizer
) -> None:
    for more in SETTINGS:
        params = SamplingParams(40, **mode, **more)
        results = engine.generate([CODE] * 2, [replace(params, seed=s) for s in range(2)])
        assert not any(broken(one.token_ids, params, tokenizer) for one in results)


def test_a_text_of_one_token_is_a_bias_of_it(engine: Engine) -> None:
    """Two ways to forbid tokens: by a mask, and by their logits."""
    ids = [ids for text in ("the", "1") for ids in encode_bad_word(text, engine.tokenizer)]
    assert {len(each) for each in ids} == {1}
    biased = SamplingParams(60, logit_bias=dict.fromkeys((each[0] for each in ids), -100.0))
    prompt = engine.chat_ids(SUM)
    found = engine.generate(prompt, SamplingParams(60, bad_words=["the", "1"])).token_ids
    assert found == engine.generate(prompt, biased).token_ids
    assert found != engine.generate(prompt, SamplingParams(60)).token_ids


def test_each_row_forbids_what_the_drafts_before_it_began(tokenizer: Tokenizer) -> None:
    """Beside a plain search in what was said: texts may begin in the answer, or in the drafts."""
    rng = np.random.default_rng(0)
    params = SamplingParams(9, bad_words=["the dog", "and the dog was", "dog dog"])
    words = [tokenizer.encode(w, add_special_tokens=False) for w in ("the dog", " dog", " was")]
    pool = sorted({id for ids in words for id in ids})
    limits, output = TokenLimits(params, manifest(), tokenizer), list[int]()
    forbidden = 0
    for _ in range(300):
        drafts = rng.choice(pool, 3).tolist()
        found = limits.make_next_constraint(drafts)
        assert (found.drafts, found.kept, limits.kept) == (drafts, 3, 3)
        masks = np.unpackbits(found.allowed.view(np.uint8), axis=1, bitorder="little")
        for row, mask in enumerate(masks):
            behind = [*output, *drafts[:row]][-8:]
            for token in pool:
                begun = broken(behind, params, tokenizer)
                bad = not begun and broken([*behind, token], params, tokenizer)
                assert begun or mask[token] == (not bad)
                forbidden += bad
        output.append(int(rng.choice([token for token in pool if masks[0, token]])))
        limits.take(output[-1])
    assert forbidden > 50


def test_drafts_behind_which_nothing_may_follow(tokenizer: Tokenizer) -> None:
    """They are not judged; an answer behind which nothing may follow ends with an error."""
    one, two = (tokenizer.encode(text, add_special_tokens=False)[0] for text in ("Q", "Z"))
    params = SamplingParams(9, allowed_token_ids=[one, two], bad_words=["QQ", "QZ"])
    found_first = [encode_bad_word(text, tokenizer)[0] for text in params.bad_words]
    assert found_first == [[one, one], [one, two]]
    limits = TokenLimits(params, manifest(), tokenizer)
    found = limits.make_next_constraint([two, one, two])
    assert (found.drafts, found.kept) == ([two], 1)
    limits.take(one)
    with pytest.raises(RequestError, match="bad_words: no token is left that may follow the an"):
        limits.make_next_constraint([two, one, two])


def test_min_tokens_may_leave_nothing(tokenizer: Tokenizer) -> None:
    """An end that is forbidden so early is no way out; later it is."""
    one = tokenizer.encode("Q", add_special_tokens=False)[0]
    limited: dict[str, Any] = {"allowed_token_ids": [EOS, one], "bad_words": ["QQ"]}
    for min_tokens, free in ((1, True), (2, False)):
        params = SamplingParams(9, min_tokens=min_tokens, **limited)
        limits = TokenLimits(params, manifest(), tokenizer)
        found = limits.make_next_constraint([one, one])
        assert found.drafts == ([one, one] if free else [])
        limits.take(one)
        with contextlib.nullcontext() if free else pytest.raises(RequestError, match="no token is"):
            masks = limits.make_next_constraint([]).allowed.view(np.uint8)
            assert np.flatnonzero(np.unpackbits(masks[0], bitorder="little")).tolist() == [EOS]


@pytest.mark.parametrize("words", [[], ["QQ"]])
def test_an_answer_may_end_after_min_tokens(words: list[str], tokenizer: Tokenizer) -> None:
    """All tokens count, not those alone that a bad word may begin with."""
    one, two = (tokenizer.encode(text, add_special_tokens=False)[0] for text in ("Q", "Z"))
    allowed = [EOS, one, two]
    params = SamplingParams(9, min_tokens=4, allowed_token_ids=allowed, bad_words=words)
    limits = TokenLimits(params, manifest(), tokenizer)
    for taken in range(6):
        masks = limits.make_next_constraint([two] * 3).allowed.view(np.uint8)
        may_end = np.unpackbits(masks, axis=1, bitorder="little")[:, EOS]
        assert may_end.tolist() == [taken + row >= 4 for row in range(4)]
        limits.take(two)


def test_texts_beyond_the_vocabulary(tokenizer: Tokenizer) -> None:
    """A tokenizer may have tokens that the model does not have."""
    small = fake_manifest(vocab_size=1000, eos=(EOS,))
    params = SamplingParams(9, bad_words=["the", "return"])
    most = max(
        id for text in params.bad_words for ids in encode_bad_word(text, tokenizer) for id in ids
    )
    assert most >= 1000
    with pytest.raises(RequestError, match=f"bad_words: token id {most} is outside the voc"):
        TokenLimits(params, small, tokenizer)


@pytest.mark.parametrize("mode", [{}, *MODES[2:]], ids=["strict", "rejection", "block"])
def test_the_limit_of_temperatures_is_greedy(mode: dict[str, Any], engine: Engine) -> None:
    """What is forbidden stays so, and log-probabilities are numbers."""
    tiny = (5e-324, 1e-46, 1e-44, 1e-38, 1e-30, 1e-20, 1e-12)
    for more in (*SETTINGS[1:], {"min_tokens": 12}, {"repetition_penalty": 100}):
        greedy = engine.generate(CODE, SamplingParams(12, **more))
        params = SamplingParams(12, **(mode | more | {"temperature": 1, "seed": 5, "logprobs": 0}))
        each = [replace(params, temperature=temperature) for temperature in tiny]
        for found in engine.generate([CODE] * len(each), each):
            assert found.token_ids == greedy.token_ids
            assert np.isfinite([one.logprob for one in found.logprobs or ()]).all()


def test_spellings_are_vllms(tokenizer: Tokenizer) -> None:
    """Plain, and behind a space where that is another token and as many of them."""

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    assert encode_bad_word("  the", tokenizer) == [ids("the"), ids(" the")]
    assert len(ids("(")) == 1
    for text in ("the", "(", "dog", "Qzx", "\n"):
        found = encode_bad_word(text, tokenizer)
        assert found[0] == ids(text.lstrip() or text)
        assert all(len(each) == len(found[0]) for each in found)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids: the list is empty"),
        ({"allowed_token_ids": [VOCABULARY]}, "allowed_token_ids: token id 2048 is outside"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids must be a list of int"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids must be a list of int"),
        ({"bad_words": [""]}, "bad_words: a text is empty"),
        ({"bad_words": [7]}, "bad_words must be a list of str"),
        ({"bad_words": ["a"] * 301}, "bad_words must be a list of 300 at most, not of 301"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1},
         "allowed_token_ids: no token is left that an answer could begin with"),
        ({"bad_words": ["a"], "structured_outputs": {"choice": ["a"]}},
         "structured_outputs can't go with bad_words"),
    ],
)  # fmt: skip
def test_what_is_refused(
    asked: dict[str, Any], says: str, engine: Engine, client: httpx2.Client
) -> None:
    """With 400 and the field's name by the server, and as a RequestError in Python."""
    field = says.partition(" ")[0].rstrip(":")
    body = {"prompt": CODE, "max_tokens": 4} | asked
    error = client.post("/v1/completions", json=body).json()["error"]
    assert says in error["message"]
    assert error["param"] == field
    if form := asked.get("structured_outputs"):
        asked = asked | {"structured_outputs": StructuredOutputs(**form)}
    with pytest.raises(RequestError, match=says.replace("(", ".")) as refused:
        engine.generate(CODE, SamplingParams(4, **asked))
    assert refused.value.setting == field


def test_synthetic_acceptance_knows_no_limits() -> None:
    by_chance: dict[str, Any] = {"acceptance": "rejection", "rejection_sample_method": "synthetic"}
    with pytest.raises(RequestError, match="bad_words can't go with synthetic acceptance"):
        SamplingParams(4, bad_words=["a"], **by_chance, synthetic_acceptance_length=2)


def test_engines_that_cant(tokenizer: Tokenizer) -> None:
    params = SamplingParams(4, bad_words=["a"])
    for able, given, says in (
        (frozenset[Any](), tokenizer, "bad_words: this engine's steps take no grammar"),
        (frozenset({"constrain"}), None, "bad_words: this engine was built without a tokenizer"),
    ):
        grammars = Grammars(manifest(), given, able)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match=says):
            grammars.make_grammar(params, None)  # type: ignore[arg-type]
