"""Launches of Triton kernels: PyTorch runs them, AOTInductor packs them, TensorRT gets their PTX.

A kernel's arguments are in the order of TensorRT's AOT plugins: inputs, 32-bit sizes, outputs. A
float is a tensor or a constant. Scratch memory is an output of one launch and an input of the next
(docs/plugins.md).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.utils._pytree import tree_map_only

from mtpbuild.plugins.definition import bind

AOT_SHARED = 48 << 10  # bytes of shared memory that TensorRT gives an AOT plugin
MULTIPROCESSORS = 132  # of an H100
INPUTS = 128  # bytes of a row's inputs in a tile; with more, fp32 tiles don't fit into AOT_SHARED
STAGES = 3  # tiles of unquantised weights in flight


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid and its arguments; all tensors are contiguous."""

    kernel: Any  # a @triton.jit function
    grid: tuple[int, ...]
    inputs: tuple[Tensor | None, ...]  # None: the kernel is compiled without it
    sizes: tuple[int, ...]
    outputs: tuple[Tensor, ...]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 1  # tiles in flight; each costs shared memory

    @classmethod
    def by_name(
        cls,
        kernel: Any,
        grid: tuple[int, ...],
        known: Mapping[str, Any],
        outputs: tuple[Tensor, ...],
        **how: int,
    ) -> "Launch":
        """Make a launch whose arguments are looked up in `known` by the kernel's parameter names.

        Parameters in capitals are constants; if `known` lacks the name, the name in small letters
        is looked up.
        """
        constants = {
            name: known[name] if name in known else known[name.lower()]
            for name in kernel.arg_names
            if name.isupper()
        }
        names = [name for name in kernel.arg_names if name not in constants]
        arguments = [known[name] for name in names[: len(names) - len(outputs)]]
        inputs = tuple(value for value in arguments if value is None or isinstance(value, Tensor))
        sizes = tuple(arguments[len(inputs) :])
        return cls(kernel, grid, inputs, sizes, outputs, constants, **how)

    def run(self) -> tuple[Tensor, ...]:
        """Run the kernel and return the outputs.

        In a trace the kernel is visible to export and AOTInductor.
        """
        from torch.library import wrap_triton
        from triton import knobs

        for tensor in (*self.inputs, *self.outputs):
            assert tensor is None or tensor.is_contiguous(), "a copy would hide a cache's cost"
        kernel = self.kernel if knobs.runtime.interpret else wrap_triton(self.kernel)
        how = {"num_warps": self.warps, "num_stages": self.stages}
        kernel[self.grid](*self.inputs, *self.sizes, *self.outputs, **self.constants, **how)
        return self.outputs


@dataclass(frozen=True)
class Launches:
    """An op's launches in order, and which of their outputs the op returns.

    With an axis, the op returns the sum of `results` over it, cast to `dtype` and reshaped to
    `shape`, if that is given.
    """

    each: tuple[Launch, ...]
    results: Any  # a tensor or a tuple of them
    axis: int | None = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None

    def run(self) -> Any:
        for launch in self.each:
            launch.run()
        if self.axis is None:
            return self.results
        total = self.results.sum(self.axis).to(self.dtype)
        return total if self.shape is None else total.reshape(self.shape)


def by_kernels(
    op: CustomOpDef, name: str = "", writes: Iterable[str] = (), returns: Any = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that runs launches as a `triton_op` with the operands of `op`.

    It can replace `op` in an exported program, where AOTInductor sees its launches. name: of the
    `triton_op`; by default the op's. writes: the operands that the function writes into. returns:
    the type of its results; by default the op's.
    """

    def register(function: Any) -> Callable[..., Any]:
        form = signature(op._init_fn)
        form = form.replace(return_annotation=returns or form.return_annotation)
        function.__signature__ = form
        triton_name = f"mtpbuild_triton::{name or op._qualname.rpartition('::')[2]}"
        return torch.library.triton_op(triton_name, function, mutates_args=set(writes) or ())

    return register


def run_launches(
    op: CustomOpDef, launches: Callable[..., Launches], *strided: str
) -> Callable[..., Any]:
    """Register a function that runs an op's launches, as `by_kernels` does.

    strided: operands that need not be contiguous; they are copied if they are not.
    """

    def run(*operands: Any) -> Any:
        known = bind(op, operands)
        known |= tree_map_only(Tensor, Tensor.contiguous, {name: known[name] for name in strided})
        return launches(*known.values()).run()

    return by_kernels(op)(run)


def cdiv(a: int, b: int) -> int:
    """Divide and round up."""
    return (a + b - 1) // b


def choose_columns(groups: int, columns: int) -> int:
    """Choose 64, 32 or 16 columns of each group, so that nearly half a GPU has a program.

    The choice does not depend on the number of rows, so neither does the rounding of a row's sums.
    """
    fits = (wide for wide in (64, 32) if groups * cdiv(columns, wide) >= 64)
    return next(fits, 16)


def round_up_to_tile(size: int, least: int = 16) -> int:
    """Round up to a power of two, at least `least`: tensor cores take no side below 16."""
    return max(least, 1 << (size - 1).bit_length())


def inputs_of_tile(weight: Tensor, depth: int, nbytes: int = INPUTS) -> int:
    """Return how many of a row's `depth` inputs a tile of an unquantised weight has."""
    return min(nbytes // weight.element_size(), round_up_to_tile(depth))


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return AOT_SHARED
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def is_hopper(device: torch.device) -> bool:
    """Return whether a device has Hopper's products of a warp group: compute capability 9.0."""
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return on_gpu and torch.cuda.get_device_capability(device)[0] == 9
