"""Messages with the role `developer`, adapted to the chat template so that none is lost."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mtpbuild.runtime.errors import RequestError

Json = dict[str, Any]
Render = Callable[[Sequence[Json]], str]
MARK = "<instruction-{}-9e3b>"
INSTRUCTIONS = ("system", "developer")


def adapt_roles(messages: list[Json], render: Render) -> list[Json]:
    """Return the messages in the first variant of which the template shows all instructions.

    The variants: role `developer` stays; it becomes `system`; the leading system messages are also
    joined into one. If the template shows none of them, the second variant is returned.
    """
    if not any(message.get("role") == "developer" for message in messages):
        return messages
    tried = [messages, *_others(messages)]
    return next((each for each in tried if _shows(each, render)), tried[1])


def _others(messages: list[Json]) -> Iterator[list[Json]]:
    system = [m | {"role": "system"} if m.get("role") == "developer" else m for m in messages]
    yield system
    first = next((i for i, m in enumerate(system) if m.get("role") != "system"), len(system))
    if first > 1:
        text = "\n\n".join(str(message.get("content", "")) for message in system[:first])
        yield [system[0] | {"content": text}, *system[first:]]


def _shows(messages: list[Json], render: Render) -> bool:
    """Return whether the rendered template contains the texts of all instructions."""
    marked, marks = [], []
    for number, message in enumerate(messages):
        if message.get("role") in INSTRUCTIONS and message.get("content"):
            marks.append(MARK.format(number))
            message = message | {"content": marks[-1]}
        marked.append(message)
    try:
        text = render(marked)
    except RequestError:
        return False
    return all(mark in text for mark in marks)
