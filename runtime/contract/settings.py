"""The table of request settings: the annotations of a field are its row.

`Setting` says how users give a field: range, flag, presence in HTTP bodies, treatment by `diff`.
`Control` makes the field an input of the mixed program. `Needs` names the fields without which it
has no effect. `SamplingParams` and `Controls` are dataclasses of such fields. Flags, HTTP fields,
lines of input files, notes of a trace and the programs' inputs are derived from them.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from mtpbuild.runtime.checks import Check, number, whole_number

T = TypeVar("T")
MAX_LOGPROBS = 20  # alternatives per token; OpenAI's API has the same limit
MAX_STOPS = 64  # stop strings; the text of each token is searched for all of them
MAX_STOP = 1024  # characters of a stop string
MAX_SALT = 256  # characters of a request's cache_salt
MAX_BIASES = 300  # tokens that a request may bias; OpenAI's API has the same limit
MAX_WORD = 256  # characters of a text in bad_words
MAX_STOP_IDS = 1024
MAX_TOKENS = 2**18  # tokens in a list of ids; no vocabulary is larger
# At this temperature even neighbouring float32 logits are so far apart that only the most probable
# token is left. Division by a lower temperature would overflow.
COLDEST = 1e-20


def read_temperature(value: object) -> float:
    """Check a temperature; one that is too low to make a difference becomes `COLDEST`."""
    found: float = number(0, 100)(value)
    return max(found, COLDEST) if found else 0.0


@dataclass(frozen=True, slots=True)
class Setting:
    """The flag of a setting, its checks, and where users may give it.

    check: returns the value to store; its ValueError says what the value must be. help: of the
    flag; a setting without help has no flag. everywhere: whether bench and eval have the flag
    besides run. parse: turns the flag's name and text into a value, if the text is not the value
    itself. http: whether HTTP bodies and lines of input files have the setting. differs: what
    `diff` does with two traces that differ in it: refuse them, note it, or ("") ignore it. tokens:
    whether its values are token ids, which must be in the engine's vocabulary.
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
    """An input of the mixed program, [B, *shape]; strings in `shape` name sizes of the engine."""

    dtype: Literal["float32", "int64", "int32", "bool"]
    shape: tuple[int | str, ...] = ()
    core: bool = True  # in every mixed program; False: only in those with penalties
    setting: str = ""  # what users call it; by default the field's name
    name: str = ""  # the field's name, filled in by `controls_in`


@dataclass(frozen=True, slots=True)
class Needs:
    """The fields that another field needs: one of them must differ from its default."""

    names: tuple[str, ...]


shaping = partial(Setting, everywhere=True, differs="refused")
penalty = partial(Setting, differs="refused")
noted = partial(Setting, differs="noted")
SAMPLED = Needs(("temperature",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The request settings that steps receive unchanged."""

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
    # Applies in the thinking phase of greedy requests; 1 means strict acceptance.
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
    # As in vLLM; plugins/penalties.py has the formulas.
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
    """Return the annotations of one type in a dataclass, by field name."""
    hints = get_type_hints(kind, include_extras=True)
    every = {f.name: getattr(hints[f.name], "__metadata__", ()) for f in fields(kind)}
    return {
        name: found for name, each in every.items() for found in each if isinstance(found, wanted)
    }


def controls_in(kind: type[Any]) -> tuple[Control, ...]:
    """Return a dataclass's fields that are inputs of the mixed program, in their order."""
    return tuple(
        replace(control, name=name, setting=control.setting or name)
        for name, control in annotations(kind, Control).items()
    )


def defaults_of(kind: type[Any]) -> dict[str, Any]:
    """Return the defaults of a dataclass's fields, by field name."""
    return {
        f.name: f.default if f.default_factory is MISSING else f.default_factory()
        for f in fields(kind)
    }
