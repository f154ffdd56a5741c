"""Compilation of kernels to PTX without a GPU, in the form that TensorRT's AOT plugins launch.

The process must not run Triton's interpreter (TRITON_INTERPRET).
"""

import re
from dataclasses import dataclass

from mtpbuild.plugins.compiling import compiled
from mtpbuild.plugins.launch import AOT_SHARED, Launch


class ContractError(ValueError):
    """The error that TensorRT can't launch a kernel as an AOT plugin."""


@dataclass(frozen=True)
class Ptx:
    """A compiled kernel; `parameters` are PTX types in the order of the launch's arguments."""

    name: str
    text: str
    target: str  # sm_80 runs on every later GPU, sm_90a only on that one
    parameters: tuple[str, ...]
    threads: int
    shared: int  # bytes


def compile_launch(launch: Launch, architecture: int) -> Ptx:
    """Compile the launch's kernel for its dtypes and constants; the tensors may be meta tensors.

    Raises ContractError if it needs scratch memory, or more shared memory than an AOT plugin has.
    """
    built = compiled(launch, architecture)
    needs = built.metadata
    if needs.global_scratch_size or needs.profile_scratch_size:
        raise ContractError(f"{needs.name} needs scratch memory")
    if needs.shared > AOT_SHARED:
        raise ContractError(f"{needs.name}: {needs.shared} bytes of shared memory > {AOT_SHARED}")
    return _without_scratch(built.asm["ptx"], needs.name, needs.shared)


def _without_scratch(text: str, name: str, shared: int) -> Ptx:
    """Remove the two scratch pointers that Triton adds after the arguments: TensorRT has none."""
    entry = re.search(r"\.visible \.entry (\w+)\((.*?)\)", text, re.DOTALL)
    assert entry is not None, "Triton writes one entry point"
    parameters = [line.strip() for line in entry[2].strip().split(",\n")]
    for i in (len(parameters) - 1, len(parameters) - 2):
        if len(re.findall(rf"\b{name}_param_{i}\b", text)) != 1:
            raise ContractError(f"{name} reads its scratch pointers")
    kept = parameters[:-2]
    body = "\n" + ",\n".join(f"\t{line}" for line in kept) + "\n"
    text = text[: entry.start(2)] + body + text[entry.end(2) :]
    (target,), (threads,) = (re.findall(rf"\.{name} (\w+)", text) for name in ("target", "reqntid"))
    kinds = tuple(line.split()[1] for line in kept)
    return Ptx(entry[1], text, target, kinds, int(threads), shared)
