"""A slice's model and state on a device, and its programs, run eagerly or compiled."""

import tempfile
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mtpbuild.builder.plan.plan import Plan, make_state_specs
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.program.programs import Program, make_programs
from mtpbuild.builder.program.trace import trace
from mtpbuild.builder.targets import configure_target
from mtpbuild.builder.weights.placed import ByteRange
from mtpbuild.runtime.programs.aot_package import Package
from on_gpu.machine import Machine
from on_gpu.parts import Parts, State
from on_gpu.random_model import forget_ranks, pretend_ranks, random_model
from on_gpu.slices import Slice

ROOM = 256  # tokens after the context


class Runner(Protocol):
    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """Run with state, which is overwritten, then arguments; return the other outputs."""
        ...


class Eagerly:
    """A program that PyTorch runs operator by operator."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @torch.no_grad()
    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        count = len(self.program.state)
        state = dict(zip(self.program.state, inputs[:count], strict=True))
        new, outputs = self.program.module(state, *inputs[count:])
        for name, tensor in state.items():
            tensor.copy_(new[name])
        return list(outputs.values())


class Bench:
    """A slice's programs and their runs; if `compiled`, they are lowered into `folder`.

    Programs that an earlier run of the same slice left there are loaded instead. All programs share
    the model's weights on the device.
    """

    def __init__(self, case: Slice, machine: Machine, compiled: bool, folder: Path) -> None:
        self.case, self.machine = case, machine
        self.compiled, self.folder, self.made = compiled, folder, 0
        self.most = max(case.nextn)
        pretend_ranks(case.ranks.tp)
        self.model = random_model(case, machine.device)
        self.weights = dict(self.model.named_parameters())
        self.parts = Parts(self.model, case.context)
        self._state = self._fill()

    def plan(self, nextn: int) -> Plan:
        length, drafter = self.case.context + ROOM, "mtp-eagle" if nextn else None
        flags = {"device": self.machine.device, "dtype": self.case.dtype}
        target = configure_target("inductor", flags)
        gpus = target.compute_capabilities(BuildRequest("slice"))
        config = self.case.config
        return Plan(
            config,
            *(nextn, drafter, 1, length, 8),
            target.style,
            self.case.ranks,
            compute_capabilities=gpus,
        )

    def _fill(self) -> State:
        """Make caches of random rows, `context` of them committed, and a window full of drafts."""
        made: State = {}
        for spec in make_state_specs(self.plan(self.most)):
            dtype = getattr(torch, spec.dtype)
            tensor = torch.zeros(spec.shape, dtype=dtype, device=self.machine.device)
            made[spec.name] = tensor.normal_() if spec.role in ("rows", "window") else tensor
        made["lengths"].fill_(self.case.context)
        made["num_drafts"].fill_(self.most)
        assert self.model.embed_tokens is not None
        made["window"].random_(self.model.embed_tokens.shape[0])  # rows of other ranks are 0
        return made

    def state(self, nextn: int) -> State:
        """Copy the state for steps with `nextn` drafts."""
        kept = {spec.name: self._state[spec.name] for spec in make_state_specs(self.plan(nextn))}
        kept["window"] = kept["window"][:, : nextn + 1]
        kept["num_drafts"] = kept["num_drafts"].clamp(max=nextn)
        if nextn:
            kept["draft_probs"] = kept["draft_probs"][:, :nextn]
        return {name: tensor.clone() for name, tensor in kept.items()}

    def step(self, nextn: int) -> Program:
        with torch.device(self.machine.device):
            return make_programs(self.plan(nextn), self.model)[1]

    def dense_layer(self) -> tuple[Program, list[Tensor], Tensor]:
        """Return a program with two sums, its operands, and its result without other ranks."""
        program, state = self.parts.layer("dense layer", 0, 1).program, self.state(0)
        given = [*(state[name] for name in program.state), *program.arguments.values()]
        return program, given, Eagerly(program).run(given)[0].clone()

    def runner(self, program: Program) -> Runner:
        """Make the runner of a program whose caches come from a state with `most` drafts."""
        if not self.compiled:
            return Eagerly(program)
        from mtpbuild.builder.targets.inductor import TARGET  # loads the compiler

        self.made += 1
        folder = self.folder / f"{self.made}-{program.name}"
        if not folder.exists():
            staged = Path(tempfile.mkdtemp(dir=self.folder))
            with torch.device(self.machine.device):
                traced = trace(program, self.plan(self.most))
            forget_ranks()  # the compiler uses its own group
            TARGET.lower(traced, dict.fromkeys(self.weights, ByteRange(0, 0)), staged)
            pretend_ranks(self.case.ranks.tp)
            staged.rename(folder)
        return Package(folder / f"{program.name}.pt2", self.weights, self.machine.device)
