"""accept_rewind in TensorRT: its Triton kernels as AOT plugins."""

from mtpbuild.plugins.accept_rewind.triton import greedy_launches
from mtpbuild.plugins.aot import as_plugins

accept_rewind_tensorrt = as_plugins(greedy_launches, lambda made: made[-1].outputs)
