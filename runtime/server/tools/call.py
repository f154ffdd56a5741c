"""What a reader of calls has in common with the others, whatever the form."""

from typing import Literal

Said = tuple[Literal["content", "name", "arguments"], str]


class Call:
    """One call, or several within the same markers, as far as the text has come.

    rest: the text after the call; None until the call is over.
    """

    rest: str | None = None
    cut = False  # it was refused only because the text ended

    def feed(self, text: str, *, last: bool) -> list[Said]:
        """Take text; returns what is certain. last: nothing follows."""
        raise NotImplementedError
