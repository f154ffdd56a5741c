"""Runs the PTX that Triton makes of a launch on the launch's tensors, which are on the CPU."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from mtpbuild.plugins.launch import Launch
from mtpbuild.plugins.ptx import compile_launch
from tests.support.ptx_machine.machine import WARP, Machine
from tests.support.ptx_machine.memory import Tensors
from tests.support.ptx_machine.program import Program, parse
from tests.support.ptx_machine.traffic import Traffic
from tests.support.specialised import compile_specialised

AT_ONCE = 1 << 15  # threads; a larger grid runs in parts
WRITTEN = {"latent_row": "cache"}  # inputs that a kernel writes into
Edit = Callable[[str], str]


def run_launch(
    launch: Launch, architecture: int, edit: Edit | None = None, traffic: Traffic | None = None
) -> None:
    """Compile a launch as Triton's JIT would for that GPU, and run it.

    edit: changes the PTX before it runs. traffic: counts accesses to shared memory. Raises PtxError
    where a GPU would fail or behave at random.
    """
    built = compile_specialised(launch, architecture)
    text: str = built.asm["ptx"]
    sizes = [size for size in launch.sizes if size != 1]  # sizes of 1 have become constants
    _run(parse(edit(text) if edit else text), launch, built.metadata.shared, sizes, traffic)


def run_plugin(launch: Launch, architecture: int, edit: Edit | None = None) -> None:
    """Run a launch as TensorRT's plugin: PTX for any sizes, flags as int32."""
    every = [tensor for tensor in (*launch.inputs, *launch.outputs) if tensor is not None]
    numbers = {id(t): t.int() for t in every if t.dtype == torch.bool}
    inputs = (
        tensor if tensor is None else numbers.get(id(tensor), tensor) for tensor in launch.inputs
    )
    outputs = tuple(numbers.get(id(tensor), tensor) for tensor in launch.outputs)
    own = replace(launch, inputs=tuple(inputs), outputs=outputs)
    ptx = compile_launch(own, architecture)
    _run(parse(edit(ptx.text) if edit else ptx.text), own, ptx.shared, launch.sizes)
    for tensor in launch.outputs:
        if id(tensor) in numbers:
            tensor.copy_(numbers[id(tensor)] != 0)


def _run(
    program: Program,
    launch: Launch,
    shared: int,
    sizes: Sequence[int],
    traffic: Traffic | None = None,
) -> None:
    into = WRITTEN.get(launch.kernel.__name__)
    named = zip(launch.kernel.arg_names, launch.inputs, strict=False)
    given = [(tensor, name == into) for name, tensor in named if tensor is not None]
    inputs = [tensor for tensor, written in given if not written]
    tensors = Tensors(inputs, [*(t for t, written in given if written), *launch.outputs])
    places = {id(t): at for t, at in zip(tensors.tensors, tensors.addresses(), strict=True)}
    own = [places[id(tensor)] for tensor in launch.outputs]
    parameters = [*(places[id(tensor)] for tensor, _ in given), *sizes, *own]
    threads = WARP * launch.warps
    each = [np.arange(n) for n in (*launch.grid, 1, 1)[:3]]
    z, y, x = (axis.flatten() for axis in np.meshgrid(*each[::-1], indexing="ij"))
    step = max(1, AT_ONCE // threads)
    for begin in range(0, len(x), step):
        some = [axis[begin : begin + step] for axis in (x, y, z)]
        machine = Machine(program, len(some[0]), threads, shared)
        machine.tensors, machine.parameters, machine.first = tensors, parameters, begin
        machine.traffic = traffic
        for name, place, count in zip("xyz", some, (*launch.grid, 1, 1), strict=False):
            machine.known[f"%ctaid.{name}"] = np.repeat(place.astype(np.uint32), threads)
            machine.known[f"%nctaid.{name}"] = np.full(machine.lanes, count, np.uint32)
        machine.run()
    tensors.give_back()
