"""Executes the PTX that Triton makes of our kernels, on a CPU: all threads of a grid at once.

`run_launch` compiles a launch for a GPU and runs it; `run_plugin` runs the PTX that TensorRT would
get. Values are NumPy arrays over the threads. Asynchronous copies arrive as late as allowed. It is
an error to read shared memory that another warp wrote without a barrier in between, or to use an
address outside of all tensors. NumPy, not a GPU, rounds tensor cores' sums and approximate
functions.
"""

from tests.support.ptx_machine.launching import run_launch, run_plugin
from tests.support.ptx_machine.machine import run_assembly
from tests.support.ptx_machine.memory import PtxError
from tests.support.ptx_machine.traffic import Traffic

__all__ = ["PtxError", "Traffic", "run_assembly", "run_launch", "run_plugin"]
