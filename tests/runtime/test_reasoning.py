"""Where a thought begins: the chat template's marks count, not those in anybody's text."""

from pathlib import Path

import pytest

from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.runtime import SamplingParams
from mtpbuild.runtime.requests.step_controls import make_step_controls
from mtpbuild.runtime.text.chat_template import ChatTemplates, TemplateText
from mtpbuild.runtime.text.detokenizer import Span, TextStream
from mtpbuild.runtime.text.reasoning import opens_thought
from mtpbuild.runtime.text.tokenizer import Tokenizer, read_backend
from tests.support.fakes import fake_manifest

FOLDER = find_model("deepseek-tiny").folder
TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
BEGIN, END = MARKS = 2, 3
SPECIAL = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}


def tokenizer(template: Path | None) -> Tokenizer:
    backend = read_backend(FOLDER / "tokenizer.json")
    if template is None:
        return Tokenizer(backend, bos_token=SPECIAL["bos_token"])
    sources = {"default": TemplateText(template.name, template.read_text(encoding="utf-8"))}
    return Tokenizer(
        backend,
        chat_template=ChatTemplates(sources, SPECIAL),
        bos_token=SPECIAL["bos_token"],
    )


TINY = tokenizer(FOLDER / "chat_template.jinja")
QWEN = tokenizer(TEMPLATES / "qwen_like.jinja")
GLM = tokenizer(TEMPLATES / "glm_like.jinja")
BARE = tokenizer(None)


@pytest.mark.parametrize(
    ("asked", "prompt", "opened"),
    [
        (TINY, "<｜User｜>a<｜Assistant｜><think>\n", True),
        (TINY, "<｜User｜>a<｜Assistant｜>\n<think>", True),
        (TINY, "<｜User｜>what is </think>?<｜Assistant｜><think>\nI think", True),
        (TINY, "<｜User｜>what is <think>?<｜Assistant｜>", False),
        (TINY, "<｜User｜>what is <think>?<｜Assistant｜>Here: ", False),
        (TINY, "<｜User｜>a<｜Assistant｜>The tag <think> is", False),
        (TINY, "<｜User｜>a<｜Assistant｜><think>b</think>", False),
        (TINY, "<｜User｜>a<｜Assistant｜><think>b</think>The tag <think>", False),
        (TINY, "<｜User｜>a<｜Assistant｜><think>b<｜User｜>c<｜Assistant｜>", False),
        (TINY, "<｜User｜>say <｜Assistant｜><think>!<｜Assistant｜>Well", False),
        (TINY, "Explain <think> tags: ", False),
        (TINY, "Explain <think>", False),
        (TINY, "<think>", False),
        (QWEN, "<|im_start|>assistant\n<think>\nfirst", True),
        (QWEN, "<|im_start|>user\n<think>\n", False),
        (GLM, "<|assistant|>\n<think>", True),
        (GLM, "<|assistant|>\n<think></think>\nA <think> b", False),
        (BARE, "Q: what? A: <think>\n", True),
        (BARE, "Explain <think> tags", False),
    ],
)
def test_what_opens_a_thought(asked: Tokenizer, prompt: str, opened: bool) -> None:
    ids = asked.encode(prompt)
    assert opens_thought(ids, MARKS, asked) is opened
    manifest = fake_manifest(vocab_size=2048)
    model = manifest.model.model_copy(update={"thinking_token_ids": MARKS})
    manifest = manifest.model_copy(update={"model": model})
    assert make_step_controls(ids, SamplingParams(), manifest, asked).thinking is opened


def test_tokens_that_a_request_names_count_wherever_they_are() -> None:
    manifest = fake_manifest(vocab_size=2048)
    named = SamplingParams(begin_thinking_phase_token=7, end_thinking_phase_token=4)
    for prompt, thinking in (([9, 7, 20], True), ([7, 20, 4, 21], False), ([9, BEGIN], False)):
        assert make_step_controls(prompt, named, manifest, TINY).thinking is thinking


def test_the_same_text_of_other_tokens_is_no_mark() -> None:
    ordinary = TINY.spell("a <think>é")
    assert not {*MARKS} & {*ordinary}
    assert TINY.text(ordinary) == "a <think>é"
    stream = TextStream(TINY, ["ink>x"], marks=MARKS)
    for token in (*ordinary, BEGIN, END):
        stream.push(token, False)
    spans = stream.take(everything=True)
    assert "".join(span.text for span in spans if span.mark is None) == "a <think>é"
    assert spans[-2:] == (Span("<think>", False, BEGIN), Span("</think>", False, END))
