"""The interface of the incremental parsers of tool calls."""

from typing import Literal

CallPart = tuple[Literal["content", "name", "arguments"], str]


class Call:
    """A parser of one call, or of several within the same markers.

    rest: the text after the call; None until the call is over.
    """

    rest: str | None = None
    truncated = False  # the text was not a call only because it ended too early

    def feed(self, text: str, *, last: bool) -> list[CallPart]:
        """Parse more text and return what is final. last: no text follows."""
        raise NotImplementedError
