"""shaped_probs in TensorRT: its Triton kernel as an AOT plugin."""

from mtpbuild.plugins.aot import as_plugins
from mtpbuild.plugins.asked import named
from mtpbuild.plugins.shaped_probs.triton import shape_launch

shaped_probs_tensorrt = as_plugins(
    lambda logits, asked: (shape_launch(logits, named(asked)),), lambda made: made[0].outputs[0]
)
