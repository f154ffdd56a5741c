"""The registry of drafters, which propose the tokens that the next step verifies.

A package adds a drafter by an entry point of the group `mtpbuild.drafters` that names a
`DrafterRecord`. Records need no torch. An engine runs without the package that its drafter came
from.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from mtpbuild.runtime.contract.registry import Registry
from mtpbuild.runtime.errors import UsageError

if TYPE_CHECKING:
    from mtpbuild.runtime.contract.state import StateSpec

EAGLE, VANILLA = "mtp-eagle", "mtp-vanilla"
ASSISTANT = "mtp-assistant"  # of a head that reads the trunk's rows, and has none
BLOCK_HEAD = "mtp-block"  # of a head that drafts all tokens in one pass (DFlash, DSpark)
NONE = "none"  # drafts nothing: `bench` subtracts its step times to time drafting


@dataclass(frozen=True)
class DrafterRecord:
    """The properties of a drafter that are known before its program is imported.

    program: `module:Class`, imported by builds alone. The class is created with nextn and has the
    methods of `Drafter` in builder/program/draft.py.

    modules: maps nextn to the number of the model's MTP modules that the drafter runs. The engine
    keeps their caches.

    lookahead: maps nextn to the number of tokens after a prompt's chunk that `prefill` reads, at
    least 1 for a drafter with modules or states. With 0, its `prefill` is not called.

    states: maps a `Plan` to the drafter's additional states: role "carry", batch as the first
    dimension. Each call of the drafter must return new tensors for all of them.

    adaptive: whether the class can also make fewer than nextn drafts in a step. Steps without
    drafts do not call it; a later `prefill` gets their tokens. Needs a lookahead of 1 at most, and
    no states.

    weights: maps the model's configuration to safetensors files of trained weights. Builds put them
    into the engine; the class reads them by `model.drafter.get_parameter(NAME)`. It may raise
    UsageError for a model that it has none for.
    """

    name: str
    program: str
    modules: Callable[[int], int] = lambda nextn: 0
    lookahead: Callable[[int], int] = lambda nextn: 0
    states: Callable[[Any], Iterable["StateSpec"]] = lambda plan: ()
    adaptive: bool = False
    weights: Callable[[Any], Iterable[Path]] = lambda config: ()

    def make(self, nextn: int) -> Any:
        """Import the drafter's class and create one that drafts nextn tokens."""
        return resolve_name(self.program)(nextn)

    @property
    def sources(self) -> tuple[str, ...]:
        """The modules that contain its code; the builder hashes them to notice changes."""
        return self.program.partition(":")[0], self.states.__module__


def _make_vanilla_states(plan: Any) -> tuple["StateSpec", ...]:
    from mtpbuild.runtime.contract.state import step_spec

    B, K = plan.max_batch, plan.nextn
    return (
        step_spec("past_tokens", "int64", (B, K)),
        step_spec("past_hidden", plan.dtype, (B, K, plan.config.step_width)),
    )


PROGRAMS = "mtpbuild.builder.program.draft"
_drafters = Registry[DrafterRecord](
    "drafter",
    "mtpbuild.drafters",
    (
        DrafterRecord(EAGLE, f"{PROGRAMS}:Eagle", lambda nextn: 1, lambda nextn: 1, adaptive=True),
        DrafterRecord(
            VANILLA, f"{PROGRAMS}:Vanilla", lambda n: n, lambda n: n, _make_vanilla_states
        ),
        DrafterRecord(ASSISTANT, f"{PROGRAMS}:Assistant", adaptive=True),
        DrafterRecord(
            BLOCK_HEAD, f"{PROGRAMS}:BlockDrafter", lambda nextn: 1, lambda nextn: 1, adaptive=True
        ),
        DrafterRecord(NONE, f"{PROGRAMS}:IdleDrafter"),
    ),
)
find_drafter, package_of_drafter = _drafters.find, _drafters.package


def list_drafters() -> tuple[str, ...]:
    """Return the names that --drafter accepts."""
    return tuple(name for name in _drafters.names() if name != NONE)


def check_offered(name: str | None) -> None:
    """Raise UsageError for a name that --drafter does not accept."""
    if name not in (None, *list_drafters()):
        raise UsageError(f"--drafter {name} is unknown; supported: {', '.join(list_drafters())}")
