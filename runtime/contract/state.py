"""The tensors that slots keep between steps, each with a role, an owner and named sizes."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from mtpbuild.runtime.contract.controls import HISTORY

StateType = Literal["int64", "bool", "float32", "bfloat16", "int8"]
# rows: one row per token, [batch, 1, rows, width], written in place. A rewind only reduces the
#    length: the rows after it are finite garbage and are overwritten later.
# window: the newest rows of a layer that sees no others, in a ring: position p is in row p % rows.
#    A rewind only reduces the length, as a ring has more rows than a window and a step together.
# recurrent: a summary of all tokens so far. A prompt's chunk advances it by all of its tokens, a
#    step by the tokens that it emits. It cannot be rewound. Programs read zeros at position 0, so
#    an earlier request's values do no harm.
# carry: a value that one step leaves for the next. When a request begins, the host writes
#    `lengths`, `window`, `num_drafts` and `thinking`; a drafter's own come from its prefill.
# history: the tokens before the window, which the host writes when a request begins.
Role = Literal["rows", "window", "recurrent", "carry", "history"]
CACHED = ("rows", "window")  # roles of rows that prompts that begin alike share
STEP = "step"  # the owner of states that belong to no layer
BLOCK = 64  # rows that the prefix cache saves together; a ring has a multiple of them
ROWS_SIZES = ("batch", "head", "rows", "width")
# The names of a slot's dimensions, for each state of the step and of its drafter.
STEP_SIZES: dict[str, tuple[str, ...]] = {
    "lengths": (),
    "window": ("window",),
    "num_drafts": (),
    "thinking": (),
    HISTORY: ("positions",),
    "draft_probs": ("drafts", "vocabulary"),
    "past_tokens": ("drafts",),
    "past_hidden": ("drafts", "hidden"),
}


class StateSpec(BaseModel):
    """A state tensor of all slots.

    Every program that has the input `name` has the output `name + ".out"`. The owner is a layer of
    the main model (`layers.3`), an MTP module (`mtp.0`) or the step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    role: Role
    owner: str = Field(default=STEP, pattern=r"^((layers|mtp)\.\d{1,6}|step)$")
    dtype: StateType
    sizes: dict[str, int]  # by name, in the order of the dimensions
    kept: bool = True  # False: a later prompt cannot begin with an earlier prompt's rows

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sizes.values())


def name_layer_rows(layer: int) -> str:
    """Return the name of the cache rows of a layer of the main model."""
    return f"kv.{layer}"


def name_module_rows(module: int) -> str:
    """Return the name of the cache rows of an MTP module."""
    return f"mtp_kv.{module}"


def name_layer_state(name: str, layer: int) -> str:
    """Return the name of a layer's recurrent state; `name` is the model family's."""
    return f"{name}.{layer}"


def make_rows_spec(
    name: str, owner: str, dtype: StateType, shape: tuple[int, ...], *, ring: bool = False
) -> StateSpec:
    """Return the spec of the cache rows of a layer or a module, [batch, 1, rows, width]."""
    sizes = dict(zip(ROWS_SIZES, shape, strict=True))
    role: Role = "window" if ring else "rows"
    return StateSpec(name=name, role=role, owner=owner, dtype=dtype, sizes=sizes)


def step_spec(name: str, dtype: StateType, shape: tuple[int, ...]) -> StateSpec:
    """Return the spec of a state of the step or of its drafter, [batch, ..]."""
    sizes = dict(zip(("batch", *STEP_SIZES[name]), shape, strict=True))
    role: Role = "history" if name == HISTORY else "carry"
    return StateSpec(name=name, role=role, dtype=dtype, sizes=sizes)
