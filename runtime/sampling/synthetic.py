"""The rates of vLLM's synthetic acceptance, where drafts are accepted by chance, for timing."""

from collections.abc import Sequence

from mtpbuild.runtime.errors import RequestError

METHOD = "rejection_sample_method"
RATES, LENGTH = "synthetic_acceptance_rates", "synthetic_acceptance_length"


def check_synthetic(method: str | None, rates: object, length: object) -> None:
    """Raise RequestError unless rates or a length are given exactly for synthetic acceptance."""
    name = f"{METHOD} 'synthetic'"
    if method == "synthetic" and (rates is None) == (length is None):
        raise RequestError(f"{name} needs exactly one of {RATES} and {LENGTH}", METHOD)
    if method != "synthetic" and (rates, length) != (None, None):
        setting = LENGTH if rates is None else RATES
        raise RequestError(f"{setting} needs {name}", setting)


def choose_synthetic_rates(
    rates: Sequence[float] | None, length: float | None, nextn: int
) -> tuple[float, ...]:
    """Return the unconditional acceptance rates of nextn positions; () if neither is given.

    A mean acceptance length L becomes 1 for the first floor(L - 1) positions, then the fraction,
    then 0. Raises RequestError if rates or length do not fit nextn.
    """
    if rates is not None:
        if len(rates) != nextn:
            wrong = f"{RATES} has {len(rates)} rates, nextn is {nextn}: one for each"
            raise RequestError(wrong, RATES)
        return tuple(rates)
    if length is None:
        return ()
    if length > nextn + 1:
        raise RequestError(f"{LENGTH} {length:g} is outside 1..{nextn + 1}", LENGTH)
    return tuple(min(max(length - 1 - position, 0.0), 1.0) for position in range(nextn))


def compute_conditional_rates(rates: tuple[float, ...]) -> tuple[float, ...]:
    """Return each position's probability, given that the positions before it are accepted."""
    before = (1.0, *rates)[: len(rates)]
    return tuple(rate / b if b else 0.0 for rate, b in zip(rates, before, strict=True))
