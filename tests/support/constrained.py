"""Checks that an engine's steps emit only tokens that masks allow, without a grammar."""

from typing import Any

import numpy as np

from mtpbuild.runtime.contract.controls import StepControls
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import Constraint

ASKED = (
    StepControls(constrained=True),
    StepControls(constrained=True, temperature=0.8, seed=1),
    StepControls(constrained=True, temperature=0.8, rejection=True, seed=1),
    StepControls(constrained=True, temperature=0.8, rejection=True, block=True, seed=1),
)


def only(tokens: list[int], manifest: Manifest) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Make masks [T, words]: row j allows only `tokens[j]`; rows behind the last are free."""
    words = -(-manifest.model.vocab_size // 32)
    masks = np.full((manifest.window, words), -1, np.int32)
    for row, token in enumerate(tokens):
        masks[row] = 0
        masks[row, token // 32] = np.uint32(1 << token % 32).astype(np.int32)
    return masks


def check_masks(programs: Any, manifest: Manifest, nextn: int | None = None) -> None:
    """Check that every rule accepts forced drafts, and others only if they are allowed.

    The second step judges the modules' own drafts; its first row allows only one token. nextn: the
    drafts of an adaptive engine's steps.
    """
    judged = manifest.window if nextn is None else nextn + 1
    slots, rows = manifest.build.max_batch, 128
    active = np.arange(slots) == 0
    tokens = [5, 31, 60, 32, 7][: manifest.window]
    for asked in ASKED:
        programs.begin(0, 3, 7, asked)
        assert programs.drafts(0) == []
        programs.constrain(0, Constraint(tokens[:-1], 0, only(tokens, manifest)))
        first = programs.step(active, rows)
        assert first.tokens[0].tolist() == tokens[:judged]
        own = programs.drafts(0)
        assert len(own) == judged - 1
        programs.constrain(0, Constraint(own, len(own), only([31], manifest)))
        second = programs.step(active, rows)
        assert second.tokens[0, 0] == 31
        assert second.num_tokens[0] == 1 or own[0] == 31, "no draft is judged by another's mask"
    programs.begin(0, 3, 7, StepControls(temperature=0.8, seed=1))
    free = programs.step(active, rows).tokens[0, 0]
    programs.begin(0, 3, 7, ASKED[1])
    programs.constrain(0, Constraint([], 0, only([], manifest)))
    assert programs.step(active, rows).tokens[0, 0] == free, "a mask of ones forbids nothing"
