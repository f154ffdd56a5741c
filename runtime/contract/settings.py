"""What a request may say, declared once: each field's annotations are its line of the table.

`Setting` is how users say a field: its range, its flag, whether HTTP bodies have it, what `diff`
makes of it. `Control` makes it an input of the mixed program. `Needs` names the fields without
which it means nothing. `SamplingParams` and `Controls` are dataclasses of such fields; flags, HTTP
fields, lines of input files, a trace's notes and the programs' inputs are read from them.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from mtpbuild.runtime.checks import Check, number, whole_number

T = TypeVar("T")
MAX_LOGPROBS = 20  # alternatives that a row reports, as many as OpenAI's API takes
MAX_STOPS = 64  # stop strings; each token's text is searched for all of them
MAX_STOP = 1024  # characters of one
MAX_SALT = 256  # characters of a request's cache_salt
MAX_BIASES = 300  # tokens that a request may bias, as many as OpenAI's API takes
MAX_WORD = 256  # characters of one of its bad_words
MAX_STOP_IDS = 1024
MAX_TOKENS = 2**18  # of a vocabulary
# The logits that a float32 can tell apart are far apart at this temperature: all that is left is
# the most probable token. Quotients by a lower one would overflow.
COLDEST = 1e-20


def read_temperature(value: object) -> float:
    """Check a temperature; one that is too low to make a difference becomes `COLDEST`."""
    found: float = number(0, 100)(value)
    return max(found, COLDEST) if found else 0.0


@dataclass(frozen=True, slots=True)
class Setting:
    """Says how users name a setting, and how it is checked.

    check: returns a value as it is kept; its ValueError says what the value must be. help: of its
    flag; a setting without help has no flag. everywhere: whether bench and eval have the flag, not
    run alone. parse: makes the value of the flag's name and text, where the text is not the value.
    http: whether bodies of the server and lines of input files have it. differs: what `diff` does
    with two traces that differ in it: it refuses them, notes it, or ("") ignores it. tokens:
    whether its values are token ids, which an engine's vocabulary must have.
    """

    check: Check
    help: str = ""
    everywhere: bool = False
    parse: Callable[[str, str], Any] | None = None
    http: bool = True
    differs: Literal["refused", "noted", ""] = ""
    tokens: bool = False


@dataclass(frozen=True, slots=True)
class Control:
    """Is one input of the mixed program: [B, *shape], where a named size is the engine's."""

    dtype: Literal["float32", "int64", "int32", "bool"]
    shape: tuple[int | str, ...] = ()
    core: bool = True  # whether every mixed program has it; else those alone that have penalties
    setting: str = ""  # what users call it, if not as the field
    name: str = ""  # the field's, when it is read from a table


@dataclass(frozen=True, slots=True)
class Needs:
    """A field counts only if one of these fields is not at its default."""

    names: tuple[str, ...]


shaping = partial(Setting, everywhere=True, differs="refused")
penalty = partial(Setting, differs="refused")
noted = partial(Setting, differs="noted")
SAMPLED = Needs(("temperature",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Holds the settings of a request that its steps are given as they are."""

    temperature: Annotated[float, shaping(read_temperature, "0: greedy."), Control("float32")] = 0.0
    top_k: Annotated[
        int,
        shaping(whole_number(-1), "Sample from so many tokens, the most probable; 0: all."),
        Control("int64"),
        SAMPLED,
    ] = 0
    top_p: Annotated[
        float,
        shaping(number(0, 1), "Sample from the most probable tokens with this much probability."),
        Control("float32"),
        SAMPLED,
    ] = 1.0
    min_p: Annotated[
        float,
        shaping(number(0, 1), "Least probability of a token, as a share of the largest."),
        Control("float32"),
        SAMPLED,
    ] = 0.0
    # In the thinking phase of a greedy request; 1 is strict.
    relaxed_topk: Annotated[
        int,
        noted(whole_number(1), "Relaxed: accept one of so many most probable tokens."),
        Control("int64"),
    ] = 1
    relaxed_delta: Annotated[
        float,
        noted(number(0, 1), "Relaxed: accept a token so much less probable than the first."),
        Control("float32"),
        Needs(("relaxed_topk",)),
    ] = 0.0
    # As in vLLM: plugins/penalties.py has the formulas.
    presence_penalty: Annotated[
        float,
        penalty(number(-2, 2), "Subtract it from the logits of tokens in the output; -2..2."),
        Control("float32", core=False),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        penalty(
            number(-2, 2), "Subtract it once for each time that the output has a token; -2..2."
        ),
        Control("float32", core=False),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        penalty(number(0.01, 100), "Above 1: tokens of prompt and output become less probable."),
        Control("float32", core=False),
    ] = 1.0


def annotations(kind: type[Any], wanted: type[T]) -> dict[str, T]:
    """Returns the annotations of one type in a dataclass's fields, by the fields' names."""
    hints = get_type_hints(kind, include_extras=True)
    every = {f.name: getattr(hints[f.name], "__metadata__", ()) for f in fields(kind)}
    return {
        name: found for name, each in every.items() for found in each if isinstance(found, wanted)
    }


def controls_in(kind: type[Any]) -> tuple[Control, ...]:
    """Lists the inputs of the mixed program that a dataclass's fields are, in their order."""
    return tuple(
        replace(control, name=name, setting=control.setting or name)
        for name, control in annotations(kind, Control).items()
    )


def defaults_of(kind: type[Any]) -> dict[str, Any]:
    """Says what each of a dataclass's fields is where nobody says anything."""
    return {
        f.name: f.default if f.default_factory is MISSING else f.default_factory()
        for f in fields(kind)
    }
