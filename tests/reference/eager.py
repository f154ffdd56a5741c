"""Runs the step program eagerly behind the run time's protocol: oracles without a target."""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.plan.plan import Plan, make_state_specs
from mtpbuild.builder.program.programs import make_programs
from mtpbuild.runtime.contract.controls import GREEDY, StepControls
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.programs import (
    FILL_DRAFTER,
    HIDDEN,
    MIXED,
    PLAIN,
    Bools,
    Ints,
    Piece,
    StepOutput,
    name_program,
)


class EagerPrograms:
    """The same state as an engine's, in torch tensors that numpy sees too."""

    def __init__(self, plan: Plan, model: CausalLM) -> None:
        self.lookahead = plan.lookahead
        self.features = frozenset({Feature.PREFIX_CACHE, Feature.ADAPT})
        self._saved: dict[int, dict[str, torch.Tensor]] = {}
        self.plan = plan
        self.programs = {program.name: program for program in make_programs(plan, model)}
        self.missed: list[tuple[int, torch.Tensor]] = []  # in slot 0, by the drafter
        self.step_program, self.mixed_program = self.programs[PLAIN], self.programs[MIXED]
        self.tensors = {
            s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype))
            for s in make_state_specs(plan)
        }

    @property
    def state(self) -> dict[str, NDArray[Any]]:
        return {name: tensor.numpy() for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        self.missed = []
        self.fill("prefill", slot, start, torch.from_numpy(tokens)[None])

    def fill(
        self, name: str, slot: int, start: int, given: torch.Tensor, *hidden: torch.Tensor
    ) -> None:
        program, chunk = self.programs[name], given.shape[1] - self.lookahead
        state = {name: self.tensors[name][slot : slot + 1] for name in program.state}
        ahead = (given[:, chunk:],) if self.lookahead else ()
        new = program.module(state, given[:, :chunk], torch.tensor([start]), *ahead, *hidden)
        for name in program.state:
            self.tensors[name][slot : slot + 1] = new[name]

    @torch.no_grad()
    def fill_drafter(self) -> None:
        """Give slot 0's drafter the tokens that it has missed."""
        if self.missed:
            newest = self.tensors["window"][0, 0]
            tokens = torch.tensor([*(token for token, _ in self.missed), newest])
            start = int(self.tensors["lengths"][0]) - len(self.missed)
            hidden = torch.cat([hidden for _, hidden in self.missed], dim=1)
            self.fill(FILL_DRAFTER, 0, start, tokens[None], hidden)
            self.missed = []

    def begin(self, slot: int, length: int, newest: int, controls: StepControls = GREEDY) -> None:
        assert controls.plain, "only the greedy program runs here"
        self.missed = []
        self.tensors["lengths"][slot] = length
        self.tensors["num_drafts"][slot] = 0
        self.tensors["window"][slot] = 0
        self.tensors["window"][slot, 0] = newest

    def draft(self, nextn: int) -> None:
        self.step_program = self.programs[name_program(PLAIN, nextn, self.plan.nextn)]

    def move(self, source: int, target: int) -> None:
        for tensor in self.tensors.values():
            tensor[target] = tensor[source]

    def finite(self, slot: int, rows: int) -> bool:
        return all(
            bool(self.tensors[name][slot, :, :rows].isfinite().all()) for name in self.caches
        )

    def clear(self, slot: int) -> None:
        for tensor in self.tensors.values():
            tensor[slot] = 0

    def save_rows(self, slot: int, start: int, pieces: Sequence[Piece]) -> bool:
        for number, count in pieces:
            rows = slice(start, start := start + count)
            held = {name: self.tensors[name][slot, 0, rows].clone() for name in self.caches}
            self._saved[number] = held
        return True

    def save_states(self, slot: int, number: int) -> bool:
        names = [s.name for s in make_state_specs(self.plan) if s.role == "recurrent"]
        self._saved[number] = {name: self.tensors[name][slot].clone() for name in names}
        return True

    def load_rows(self, slot: int, pieces: Sequence[Piece]) -> None:
        start = 0
        for number, count in pieces:
            for name, rows in self._saved[number].items():
                self.tensors[name][slot, 0, start : start + count] = rows[:count]
            start += count

    def load_states(self, slot: int, number: int) -> None:
        for name, state in self._saved[number].items():
            self.tensors[name][slot] = state

    def discard(self, number: int) -> None:
        self._saved.pop(number, None)

    def saved(self, number: int) -> dict[str, NDArray[Any]]:
        return {name: tensor.numpy() for name, tensor in self._saved[number].items()}

    @property
    def caches(self) -> list[str]:
        return [s.name for s in make_state_specs(self.plan) if s.role == "rows"]

    @torch.no_grad()
    def step(self, active: Bools, rows: int) -> StepOutput:
        before, names = self.tensors, self.step_program.state
        if HIDDEN not in self.step_program.results:
            self.fill_drafter()
        given = {name: before[name] for name in names}
        new, outputs = self.step_program.module(given, torch.from_numpy(active))
        self.tensors = before | new
        if HIDDEN in outputs:
            self.missed.append((int(before["window"][0, 0]), outputs.pop(HIDDEN)[:1]))
        arrays = {name: tensor.numpy() for name, tensor in outputs.items()}
        return StepOutput(
            window=before["window"].numpy(), num_drafts=before["num_drafts"].numpy(), **arrays
        )
