"""What runs engines for a build: the compiler itself runs none."""

from pathlib import Path
from typing import Protocol

from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages


class Workbench(Protocol):
    """Instruments that need a running engine; whoever calls the compiler brings them."""

    def write_texts(
        self, request: BuildRequest, prompts: Path | None, folder: Path, stages: Stages
    ) -> list[list[int]]:
        """Build an engine, let it answer prompts, and return the texts' tokens.

        prompts: a file of them; None: the package's. folder: keeps what is finished, for the next
        build if this one is cut off.
        """
        ...

    def finish(self, folder: Path, name: str, stages: Stages, *, exact: bool) -> None:
        """Probe an engine in its staged folder, and write into its manifest what was seen.

        name: the engine's, for messages. Raises BuildError if results are not exact and `exact`
        demands it. The steps of an adaptive engine are timed, too.
        """
        ...
