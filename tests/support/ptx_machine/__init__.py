"""Executes the PTX that Triton makes of our kernels, on a CPU: all threads of a grid at once.

`run_launch` compiles a launch for a GPU and runs it, `run_plugin` what TensorRT would get. Values
are NumPy arrays over the threads. Copies that are asynchronous arrive as late as they may. What a
thread reads of shared memory that another warp wrote without a barrier between ends in an error,
and so does an address outside of all tensors. Sums of tensor cores and approximate functions are
rounded as NumPy does it, not as a GPU.
"""

from tests.support.ptx_machine.launching import run_launch, run_plugin
from tests.support.ptx_machine.machine import run_assembly
from tests.support.ptx_machine.memory import PtxError
from tests.support.ptx_machine.traffic import Traffic

__all__ = ["PtxError", "Traffic", "run_assembly", "run_launch", "run_plugin"]
