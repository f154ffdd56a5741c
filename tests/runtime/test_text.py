"""Incremental text is the text: no character cut, no stop string shown, nothing lost."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mtpbuild.runtime.text.detokenizer import Span, TextStream, Thought
from mtpbuild.runtime.text.tokenizer import Tokenizer
from tests.support.fakes import backend_tokenizer, fake_tokenizer

BACKEND = backend_tokenizer()
TOKENIZER = fake_tokenizer(BACKEND)


def pieces(text: TextStream, tokens: list[int]) -> list[str]:
    """Return the text after each token, and what comes at the end."""
    parts = []
    for token in tokens:
        text.push(token, False)
        parts.append("".join(span.text for span in text.take()))
    return [*parts, "".join(span.text for span in text.take(everything=True))]


@given(st.lists(st.integers(0, 330)))
def test_any_tokens_give_what_decoding_all_at_once_gives(tokens: list[int]) -> None:
    whole = BACKEND.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces(TextStream(TOKENIZER, ()), tokens)) == whole


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    output = "".join(pieces(TextStream(TOKENIZER, ()), tokens))
    assert output == text.replace("<s>", "").replace("</s>", "")


def test_a_character_comes_when_its_last_byte_has_come() -> None:
    tokens = TOKENIZER.encode("🦊", add_special_tokens=False)  # not in the training text
    assert len(tokens) > 1
    assert pieces(TextStream(TOKENIZER, ()), tokens) == [*[""] * (len(tokens) - 1), "🦊", ""]


def test_half_a_character_at_the_end_is_replaced() -> None:
    tokens = TOKENIZER.encode("🦊", add_special_tokens=False)[:-1]
    assert pieces(TextStream(TOKENIZER, ()), tokens) == [*[""] * len(tokens), "\ufffd"]


def test_special_tokens_are_silent_and_other_added_ones_are_not() -> None:
    tokens = TOKENIZER.encode("<s>a</s><think>｜end｜", add_special_tokens=False)
    assert len(tokens) == 5
    assert pieces(TextStream(TOKENIZER, ()), tokens) == ["", "a", "", "<think>", "｜end｜", ""]


@given(
    text=st.text(alphabet="abc ", max_size=40),
    stop=st.lists(st.text(alphabet="abc ", min_size=1, max_size=5), min_size=1, max_size=3),
)
@example(text="one S STO STOP two", stop=["STOP"])
@example(text="one STOP", stop=["STOP"])
def test_stop_strings_cut_at_their_first_appearance(text: str, stop: list[str]) -> None:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    stream, released, stopped = TextStream(TOKENIZER, stop), "", False
    for token in tokens:
        stopped = stream.push(token, False)
        released += "".join(span.text for span in stream.take())
        assert not any(s in released for s in stop)
        if stopped:
            break
    released += "".join(span.text for span in stream.take(everything=True))
    assert stopped == any(s in text for s in stop)
    # Of strings that one token completes together, the first to begin counts.
    ends = [text.find(s) for s in stop if s in text]
    assert text.startswith(released)
    assert not stopped or any(text.startswith(s, len(released)) for s in stop)
    assert stopped or released == text
    assert not stopped or len(released) >= min(ends)


@given(
    text=st.text(alphabet="ab \n", max_size=30),
    stop=st.text(alphabet="ab \n", min_size=1, max_size=5),
    least=st.integers(0, 12),
    thinks=st.booleans(),
)
@example(text="one STOP two", stop="STOP", least=6, thinks=False)
@example(text="\n\nHello", stop="\n\n", least=0, thinks=True)
@example(text="\n\n", stop="\n\n", least=0, thinks=True)
@example(text="\n\n", stop="\n\n", least=9, thinks=True)
def test_stop_strings_count_if_their_end_may_end_the_text(
    text: str, stop: str, least: int, thinks: bool
) -> None:
    """As in vLLM: with token number `least` or a later one, wherever they begin."""
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    thought = Thought((298, 299), thinking=False) if thinks else None
    stream, known, stopped = TextStream(TOKENIZER, [stop], thought=thought), [0], False
    for count, token in enumerate(tokens, 1):
        stopped = stream.push(token, False, may_stop=count >= least)
        known.append(stream.length)
        if stopped:
            break
    stopped = stopped or stream.cut_at_stop()  # in white space that a thought might have followed
    output = "".join(span.text for span in stream.take(everything=True))
    first = known[min(max(least - 1, 0), len(known) - 1)]
    at = text.find(stop, max(0, first + 1 - len(stop)))
    assert (output, stopped) == ((text[:at], True) if at >= 0 else (text, False))


def test_what_only_looked_like_a_stop_string_is_released_with_its_origin() -> None:
    stream = TextStream(TOKENIZER, ["XYZ"])
    [x, y, a] = TOKENIZER.encode("XYa", add_special_tokens=False)
    assert not stream.push(x, True)
    assert not stream.push(y, False)
    assert stream.take() == ()
    assert not stream.push(a, True)
    assert stream.take() == (Span("X", True), Span("Y", False), Span("a", True))


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextStream(None, ())
    assert not stream.push(5, True)
    assert stream.take(everything=True) == ()


def test_encode_adds_one_bos() -> None:
    assert TOKENIZER.encode("a")[0] == 0
    assert TOKENIZER.encode("<s>a") == TOKENIZER.encode("a")
    assert TOKENIZER.encode("a", add_special_tokens=False) == TOKENIZER.encode("a")[1:]


def test_a_tokenizer_without_template_says_so() -> None:
    with pytest.raises(Exception, match="has no chat_template"):
        Tokenizer(BACKEND).chat_prompt([])
