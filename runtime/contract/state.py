"""States are what slots hold between steps: each has a role, an owner and named sizes."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from mtpbuild.runtime.contract.controls import HISTORY

StateType = Literal["int64", "bool", "float32", "bfloat16"]
# rows: one for each token, [batch, 1, rows, width], written in place. A rewind is a smaller length:
#   the rows behind it are garbage, always finite, and overwritten later.
# recurrent: what all tokens so far have left behind. A prompt's chunk advances it by all of its
#   tokens, a step by those that it emits. Nothing rewinds it; at position 0 it counts as zeros,
#   whatever an earlier request has left.
# carry: what a step leaves for the next one; the host writes it when a request begins.
# history: the tokens before the window, which the host writes when a request begins.
Role = Literal["rows", "recurrent", "carry", "history"]
STEP = "step"  # the owner of what belongs to no layer
ROWS_SIZES = ("batch", "head", "rows", "width")
# The sizes of a slot's place in each state of the step and of its drafter.
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
    """Describes one state tensor of all slots.

    Every program that has the input `name` has the output `name + ".out"`. The owner is a layer of
    the main model (`layers.3`), an MTP module (`mtp.0`) or the step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    role: Role
    owner: str = Field(default=STEP, pattern=r"^((layers|mtp)\.\d{1,6}|step)$")
    dtype: StateType
    sizes: dict[str, int]  # by name, in the order of the dimensions
    kept: bool = True  # whether it lets a later prompt begin with the rows of an earlier one

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sizes.values())


def layer_rows(layer: int) -> str:
    """Returns the name of the rows that a layer of the main model keeps."""
    return f"kv.{layer}"


def module_rows(module: int) -> str:
    """Returns the name of the rows that an MTP module keeps."""
    return f"mtp_kv.{module}"


def layer_state(name: str, layer: int) -> str:
    """Returns the name of a layer's recurrent state, which its family calls `name`."""
    return f"{name}.{layer}"


def rows_spec(name: str, owner: str, dtype: StateType, shape: tuple[int, ...]) -> StateSpec:
    """Describes rows of a layer or a module, [batch, 1, rows, width]."""
    sizes = dict(zip(ROWS_SIZES, shape, strict=True))
    return StateSpec(name=name, role="rows", owner=owner, dtype=dtype, sizes=sizes)


def step_spec(name: str, dtype: StateType, shape: tuple[int, ...]) -> StateSpec:
    """Describes a state of the step, or of its drafter, [batch, ..]."""
    sizes = dict(zip(("batch", *STEP_SIZES[name]), shape, strict=True))
    role: Role = "history" if name == HISTORY else "carry"
    return StateSpec(name=name, role=role, dtype=dtype, sizes=sizes)
