"""mla_attention in TensorRT: its Triton kernels as AOT plugins."""

from mtpbuild.plugins.aot import as_plugins
from mtpbuild.plugins.mla_attention.triton import mla_launches

mla_attention_tensorrt = as_plugins(mla_launches, lambda made: made[-1].outputs[0])
