"""Rates of synthetic acceptance (vLLM): drafts are accepted by chance, to time an engine."""

from mtpbuild.runtime.errors import RequestError


def check_rates(rates: object) -> tuple[float, ...]:
    """Rates in 0..1, none larger than the one before; raises RequestError."""
    if isinstance(rates, list | tuple) and all(isinstance(r, int | float) for r in rates):
        steps = zip((1.0, *rates), (*rates, 0.0), strict=True)
        if rates and all(before >= after for before, after in steps):
            return tuple(map(float, rates))
    raise RequestError(
        f"synthetic_acceptance_rates must be non-increasing numbers in 0..1, not {rates!r}"
    )


def synthetic_rates(
    rates: tuple[float, ...] | None, length: float | None, nextn: int
) -> tuple[float, ...]:
    """Unconditional acceptance rate of each of nextn positions; () if neither is given.

    A mean acceptance length L becomes 1 for the first floor(L - 1) positions, then the fraction,
    then 0. Raises RequestError if rates or length don't fit nextn.
    """
    if rates is not None:
        if len(rates) != nextn:
            raise RequestError(
                f"synthetic_acceptance_rates has {len(rates)} rates, nextn is {nextn}: one for each"
            )
        return rates
    if length is None:
        return ()
    if length > nextn + 1:
        raise RequestError(f"synthetic_acceptance_length {length:g} is outside 1..{nextn + 1}")
    return tuple(min(max(length - 1 - position, 0.0), 1.0) for position in range(nextn))


def conditional(rates: tuple[float, ...]) -> tuple[float, ...]:
    """Chance of each position given that those before it are accepted."""
    before = (1.0, *rates)[: len(rates)]
    return tuple(rate / b if b else 0.0 for rate, b in zip(rates, before, strict=True))
