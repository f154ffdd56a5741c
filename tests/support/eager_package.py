"""Runs a GPU's programs eagerly, without a build: a package and the manifest beside it."""

from typing import Any

import torch
from torch import Tensor

from mtpbuild.builder.plan.plan import Plan, make_state_specs
from mtpbuild.builder.program.programs import Program
from mtpbuild.runtime.contract.controls import MAX_LOGPROBS
from mtpbuild.runtime.contract.manifest import (
    FileSpec,
    Manifest,
    ProgramSpec,
    TargetInfo,
    TensorSpec,
)
from tests.support.fakes import fake_manifest


class EagerPackage:
    """A program that runs eagerly and overwrites its state, as a compiled one does.

    `slots` notes how many slots each run computed.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.slots: list[int] = []

    @torch.no_grad()
    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        self.slots.append(len(inputs[0]))
        names = (*self.program.state, *self.program.arguments)
        given = dict(zip(names, inputs, strict=True))
        state = {name: given[name] for name in self.program.state}
        result = self.program.module(state, *(given[name] for name in self.program.arguments))
        new, outputs = result if isinstance(result, tuple) else (result, {})
        for name, tensor in state.items():
            tensor.copy_(new[name])
        return list(outputs.values())


def manifest_of(plan: Plan, programs: tuple[Program, ...]) -> Manifest:
    """Write the manifest that a build for a GPU would write."""
    manifest = fake_manifest(
        nextn=plan.nextn,
        max_batch=plan.max_batch,
        max_seq_len=plan.max_seq_len,
        prefill_chunk=plan.prefill_chunk,
        vocab_size=plan.config.vocab_size,
        lookahead=plan.lookahead,
    )
    T, ints = plan.window, {"tokens", "num_tokens", "top_ids", "draft_ranks"}

    def spec(name: str, tensor: Tensor) -> TensorSpec:
        sizes: tuple[int | str, ...] = ("batch", *tensor.shape[1:])
        if name == "tokens":
            sizes = (1, "chunk")
        elif name in ("ahead", "start"):
            sizes = tuple(tensor.shape)
        dtype: Any = str(tensor.dtype).removeprefix("torch.")
        return TensorSpec(name=name, dtype=dtype, shape=sizes)

    def result(name: str) -> TensorSpec:
        shape: tuple[int, ...] = () if name == "num_tokens" else (T,)
        shape = (T, MAX_LOGPROBS) if name.startswith("top") else shape
        dtype: Any = "int64" if name in ints else "float32"
        return TensorSpec(name=name, dtype=dtype, shape=("batch", *shape))

    state = {s.name: s for s in make_state_specs(plan)}
    specs = {
        p.name: ProgramSpec(
            file=f"{p.name}.pt2",
            inputs=(
                *(
                    TensorSpec(name=n, dtype=state[n].dtype, shape=(p.batch, *state[n].shape[1:]))
                    for n in p.state
                ),
                *(spec(n, tensor) for n, tensor in p.arguments.items()),
            ),
            outputs=tuple(result(n) for n in p.outputs),
        )
        for p in programs
    }
    target = TargetInfo(
        name="inductor",
        hardware="NVIDIA GPU of compute capability 9.0",
        versions={},
        compute_capabilities=("9.0",),
    )
    files = {"weights.safetensors": FileSpec(size=5 * 10**9, sha256="")}
    build = manifest.build.model_copy(update={"capacity": plan.capacity})
    found = {"build": build, "programs": specs, "state": tuple(state.values())}
    return manifest.model_copy(update=found | {"target": target, "files": files})
