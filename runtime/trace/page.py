"""The HTML page of a trace: the text token by token, with the origin of each token."""

import codecs
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.files import replace_file
from mtpbuild.runtime.sampling.params import DEFAULTS
from mtpbuild.runtime.text.tokenizer import Tokenizer
from mtpbuild.runtime.trace.lines import Line, TaskId, TracedRequest, add_line

TEMPLATE, PLACE = "page.html", "TRACE_DATA"
# Settings that have no effect on texts.
UNSEEN = ("logprobs", "prompt_logprobs", "cache_salt", "timeout")


class Page:
    """A page that collects lines and is written, by way of a temporary file, when it is closed."""

    def __init__(self, path: Path, tokenizer: Tokenizer | None) -> None:
        self._path, self._tokenizer = path, tokenizer
        self._requests: dict[TaskId, TracedRequest] = {}

    def write(self, line: Line) -> None:
        add_line(line, self._requests)

    def close(self) -> None:
        if not self._requests:
            return
        page = render_page(list(self._requests.values()), self._tokenizer)
        try:
            with replace_file(self._path) as file:
                file.write(page.encode())
        except OSError as error:
            raise UsageError(f"{self._path}: can't be written ({error.strerror})") from None


def render_page(requests: list[TracedRequest], tokenizer: Tokenizer | None) -> str:
    """Return the page's HTML, which loads no other file."""
    template = files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    data = json.dumps([_make_data(request, tokenizer) for request in requests])
    # Only "<" can end a script element or begin a comment in it.
    return template.replace(PLACE, data.replace("<", "\\u003c"))


def _list_settings(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, as JSON, that differ from their defaults and bear on the text.

    max_tokens is always among them.
    """
    usual = json.loads(json.dumps({name: DEFAULTS.get(name) for name in params}))
    return {
        name: value
        for name, value in params.items()
        if name == "max_tokens" or (name not in UNSEEN and value != usual[name])
    }


def _make_data(traced: TracedRequest, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return a request's lines, with the text of each token."""
    speller, request = Speller(tokenizer), traced.request.model_dump(mode="json")
    prompt = [speller.next(token) for token in traced.request.prompt]
    steps = []
    for step in traced.steps:
        drafts = [Speller(tokenizer).next(token) for token in step.window[1:]]
        texts = [speller.next(token) for token in step.tokens]
        steps.append(step.model_dump(mode="json") | {"texts": texts, "draft_texts": drafts})
    return {
        "request": request | {"texts": prompt, "settings": _list_settings(request["params"])},
        "steps": steps,
        "end": traced.end and traced.end.model_dump(mode="json"),
        "acceptance_length": traced.acceptance_length,
    }


class Speller:
    """A speller of consecutive tokens, each as [kind, text].

    "text" is the text that a token completes; it is empty if the token ends within a character.
    "special" is the name of a token without text, "id" a token's number if there is no tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, token: int) -> tuple[str, str]:
        if self._tokenizer is None:
            return "id", str(token)
        if name := self._tokenizer.find_special_name(token):
            return "special", name
        return "text", self._utf8.decode(self._tokenizer.decode_token(token))
