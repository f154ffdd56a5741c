"""Ranks are the processes that share a model: a value that flags, manifests and graphs agree on."""

from dataclasses import dataclass, replace

from mtpbuild.runtime.errors import UsageError

MAX_RANKS = 64


@dataclass(frozen=True)
class Ranks:
    """Says how many ranks share a model, and how; a single one holds the whole.

    They form `ep` groups: those of a group hold only their part of the routed experts, and of each
    of these one of tp / ep column parts. All else is split tp ways or replicated; with
    attention-DP it is whole on each rank, which then has requests of its own.
    """

    tp: int = 1
    ep: int = 1
    attention_dp: bool = False

    @property
    def parts(self) -> int:
        """Returns the number of parts that all is split into but the routed experts."""
        return 1 if self.attention_dp else self.tp

    @property
    def serving(self) -> int:
        """Ranks that have requests of their own; those that share all of the model are one."""
        return self.tp if self.attention_dp else 1

    @property
    def suffix(self) -> str:
        """Give what stands behind an engine's name: `_tp8_ep2`, or nothing if there is one rank."""
        named = {"tp": self.tp, "ep": self.ep}
        found = "".join(f"_{name}{count}" for name, count in named.items() if count > 1)
        return found + ("_adp" if self.attention_dp else "")

    def local(self, requests: int) -> int:
        """Requests that the fullest rank serves."""
        return -(-requests // self.serving)

    def check(self, experts: int) -> None:
        """Raise UsageError for numbers that fit no model of so many routed experts."""
        for flag, value in (("--tp", self.tp), ("--ep", self.ep)):
            if not 1 <= value <= MAX_RANKS:
                raise UsageError(f"{flag} {value} is outside 1..{MAX_RANKS}")
        most = max(experts, 1)
        good = [n for n in range(1, self.tp + 1) if self.tp % n == 0 and most % n == 0]
        if self.ep not in good:
            raise UsageError(
                f"--ep {self.ep} does not divide both --tp {self.tp} and the {experts} routed "
                f"experts; possible: {listed(good)}"
            )
        if self.attention_dp and self.tp == 1:
            raise UsageError("--attention-dp is for several ranks: say --tp, how many they are")

    def others(self, most: int = MAX_RANKS) -> list["Ranks"]:
        """Returns the same with every tp up to `most` that ep divides."""
        return [replace(self, tp=n) for n in range(self.ep, most + 1, self.ep)]


ALONE = Ranks()


def listed(values: list[int]) -> str:
    return ", ".join(map(str, values)) or "none"
