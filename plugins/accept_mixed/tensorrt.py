"""accept_mixed in TensorRT: its Triton kernels as AOT plugins."""

from mtpbuild.plugins.accept_mixed.triton import mixed_launches, verdict_of
from mtpbuild.plugins.aot import as_plugins

accept_mixed_tensorrt = as_plugins(mixed_launches, verdict_of)
