"""StructuredOutputs says what form an answer must have, under vLLM's names."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from json import dumps, loads
from typing import Any

from mtpbuild.runtime.errors import RequestError

NAMED = ("properties", "$defs", "definitions")  # keywords that hold schemas by names
PARTS = ("items", "prefixItems", "anyOf", "oneOf", "additionalProperties")  # one, or a list
JOINED = {"allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties", "dependentSchemas"}


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """Is one form that an answer must have; raises RequestError for none, two, or another type.

    json: a JSON schema, as text or as an object. regex: the whole answer matches it. choice: the
    answer is one of these texts. grammar: in Lark's syntax (llguidance's variant) or in llama.cpp's
    GBNF. json_object: any JSON object. JSON is written without white space. An object whose
    properties are listed has no others, unless the schema says `additionalProperties`.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if self.json is False:  # a schema too: nothing fits it
            given.append("json")
        if len(given) != 1:
            names = ", ".join(f.name for f in fields(self))
            raise RequestError(f"structured_outputs: give one of {names}, not {len(given)}")
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise RequestError(f"structured_outputs: {name} must be a text")
        if not isinstance(self.json_object, bool | None):
            raise RequestError("structured_outputs: json_object must be true or false")
        if not isinstance(self.json, str | None):
            try:
                object.__setattr__(self, "json", dumps(self.json, ensure_ascii=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise RequestError(f"structured_outputs: json is no schema ({error})") from None
        if self.choice is not None:
            texts = isinstance(self.choice, list | tuple) and self.choice
            if not texts or not all(isinstance(text, str) for text in texts):
                raise RequestError("structured_outputs: choice must be a list of texts")
            object.__setattr__(self, "choice", tuple(texts))


def closed(text: str) -> str:
    """Returns a schema whose objects have no properties but those that it lists.

    Else a model can go on inventing them. What fits the result fits the schema. One that joins
    properties from several places stays as it is, and so does a text that is no schema.
    """
    try:
        schema = loads(text)
        every = [*_within(schema)]
    except (ValueError, RecursionError):
        return text
    if any("allOf" in one or ("properties" in one and JOINED & one.keys()) for one in every):
        return text
    for one in every:
        if "properties" in one:
            one.setdefault("additionalProperties", False)
    return dumps(schema, ensure_ascii=False)


def _within(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields a schema and all schemas in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    named = [schema[name] for name in NAMED if isinstance(schema.get(name), dict)]
    parts = [schema[name] for name in PARTS if name in schema]
    inner = [one for found in named for one in found.values()]
    inner += [one for found in parts for one in (found if isinstance(found, list) else [found])]
    for one in inner:
        yield from _within(one)
