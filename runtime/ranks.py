"""Ranks, the processes that share a model, as flags, manifests and graphs describe them."""

from dataclasses import dataclass, replace

from mtpbuild.runtime.errors import UsageError

MAX_RANKS = 64


@dataclass(frozen=True)
class Ranks:
    """The number of ranks and the way in which they share a model; a single rank has all of it.

    The ranks form `ep` groups. A group has its part of the routed experts, and each of its tp / ep
    ranks has some columns of these. All other weights are split tp ways or replicated; with
    attention-DP each rank has all of them, and its own requests.
    """

    tp: int = 1
    ep: int = 1
    attention_dp: bool = False

    @property
    def parts(self) -> int:
        """The number of parts of all weights except those of routed experts."""
        return 1 if self.attention_dp else self.tp

    @property
    def serving(self) -> int:
        """The number of ranks with their own requests; ranks that share requests count as one."""
        return self.tp if self.attention_dp else 1

    @property
    def suffix(self) -> str:
        """The suffix of an engine's name, such as `_tp8_ep2`; "" for one rank."""
        named = {"tp": self.tp, "ep": self.ep}
        suffix = "".join(f"_{name}{count}" for name, count in named.items() if count > 1)
        return suffix + ("_adp" if self.attention_dp else "")

    def local(self, requests: int) -> int:
        """Return the number of requests on the rank with the most."""
        return -(-requests // self.serving)

    def check(self, experts: int) -> None:
        """Raise UsageError for numbers that fit no model with `experts` routed experts."""
        for flag, value in (("--tp", self.tp), ("--ep", self.ep)):
            if not 1 <= value <= MAX_RANKS:
                raise UsageError(f"{flag} {value} is outside 1..{MAX_RANKS}")
        count = max(experts, 1)
        good = [n for n in range(1, self.tp + 1) if self.tp % n == 0 and count % n == 0]
        if self.ep not in good:
            raise UsageError(
                f"--ep {self.ep} does not divide both --tp {self.tp} and the {experts} routed "
                f"experts; possible: {join_numbers(good)}"
            )
        if self.attention_dp and self.tp == 1:
            raise UsageError("--attention-dp is for several ranks: say --tp, how many they are")

    def others(self, max_ranks: int = MAX_RANKS) -> list["Ranks"]:
        """Return the same split for every tp up to `max_ranks` that ep divides."""
        return [replace(self, tp=n) for n in range(self.ep, max_ranks + 1, self.ep)]


ALONE = Ranks()


def join_numbers(values: list[int]) -> str:
    return ", ".join(map(str, values)) or "none"
