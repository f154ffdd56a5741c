"""Drafters by name: each is a way to propose the tokens that the next step verifies.

A package adds its own by entry points of the group `mtpbuild.drafters`, each a `DrafterRecord`. A
record needs no torch, and an engine runs without the package that its drafter came from.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from mtpbuild.runtime.contract.registry import Registry
from mtpbuild.runtime.errors import UsageError

if TYPE_CHECKING:
    from mtpbuild.runtime.contract.state import StateSpec

EAGLE, VANILLA = "mtp-eagle", "mtp-vanilla"
NONE = "none"  # drafts nothing real: `bench` subtracts its steps to time drafting


def _nothing(plan: Any) -> tuple["StateSpec", ...]:
    return ()


@dataclass(frozen=True)
class DrafterRecord:
    """Says what is known of a drafter before its program is imported.

    program: `module:Class`, which only a build imports. The class is made with nextn and has the
    methods of `Drafter` in builder/program/draft.py.

    modules: returns how many of the model's MTP modules it runs for a nextn. The engine keeps their
    caches.

    lookahead: returns how many tokens behind a prompt's chunk its `prefill` takes, at least 1 for a
    drafter that has modules or states. With 0, `prefill` is not called.

    states: returns, for a `Plan`, what it carries from step to step besides: states with role
    "carry" whose first size is the batch. Each call must return the new tensors of all.

    adaptive: whether the class also makes fewer drafts than the engine has places for, even none.
    """

    name: str
    program: str
    modules: Callable[[int], int] = lambda nextn: 0
    lookahead: Callable[[int], int] = lambda nextn: 0
    states: Callable[[Any], Iterable["StateSpec"]] = _nothing
    adaptive: bool = False

    def make(self, nextn: int) -> Any:
        """Import its class and make one that drafts nextn tokens."""
        return resolve_name(self.program)(nextn)

    @property
    def sources(self) -> tuple[str, ...]:
        """Returns the modules with its code: an engine is built again when they change."""
        return self.program.partition(":")[0], self.states.__module__


def _past(plan: Any) -> tuple["StateSpec", ...]:
    from mtpbuild.runtime.contract.state import step_spec

    B, K = plan.max_batch, plan.nextn
    return (
        step_spec("past_tokens", "int64", (B, K)),
        step_spec("past_hidden", plan.dtype, (B, K, plan.config.hidden_size)),
    )


PROGRAMS = "mtpbuild.builder.program.draft"
_drafters = Registry[DrafterRecord](
    "drafter",
    "mtpbuild.drafters",
    (
        DrafterRecord(EAGLE, f"{PROGRAMS}:Eagle", lambda nextn: 1, lambda nextn: 1, adaptive=True),
        DrafterRecord(VANILLA, f"{PROGRAMS}:Vanilla", lambda n: n, lambda n: n, _past),
        DrafterRecord(NONE, f"{PROGRAMS}:Idle"),
    ),
)
find_drafter = _drafters.find


def offered() -> tuple[str, ...]:
    """Returns the names that --drafter takes."""
    return tuple(name for name in _drafters.names() if name != NONE)


def check_offered(name: str | None) -> None:
    """Refuse a name that --drafter does not take."""
    if name not in (None, *offered()):
        raise UsageError(f"--drafter {name} is unknown; supported: {', '.join(offered())}")
