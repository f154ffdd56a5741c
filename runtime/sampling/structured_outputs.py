"""StructuredOutputs, the form that an answer must have, with vLLM's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from json import dumps
from typing import Any

from mtpbuild.runtime.errors import RequestError


def make_form_error(problem: str) -> RequestError:
    return RequestError(f"structured_outputs: {problem}", "structured_outputs")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """One form that an answer must have; RequestError for none, several, or a wrong type.

    json: a JSON schema, as text or as an object. regex: matches the whole answer. choice: the texts
    of which the answer is one. grammar: in Lark's syntax (llguidance's variant) or in llama.cpp's
    GBNF. json_object: any JSON object. JSON is written without white space. An object whose
    properties are listed has no others, unless the schema has `additionalProperties`.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        forms = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if self.json is False:  # a schema too, which no answer fits
            forms.append("json")
        if len(forms) != 1:
            names = ", ".join(f.name for f in fields(self))
            raise make_form_error(f"give one of {names}, not {len(forms)}")
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise make_form_error(f"{name} must be a text")
        if not isinstance(self.json_object, bool | None):
            raise make_form_error("json_object must be true or false")
        if not isinstance(self.json, str | None):
            try:
                object.__setattr__(self, "json", dumps(self.json, ensure_ascii=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise make_form_error(f"json is no schema ({error})") from None
        if self.choice is not None:
            texts = isinstance(self.choice, list | tuple) and self.choice
            if not texts or not all(isinstance(text, str) for text in texts):
                raise make_form_error("choice must be a list of texts")
            object.__setattr__(self, "choice", tuple(texts))
