"""Target onnxruntime, the embedded default: ONNX graphs for any CPU, without torch at run time."""

from mtpbuild.builder.targets.target import Target


class OnnxRuntime(Target):
    name = "onnxruntime"
    lowering = "mtpbuild.builder.targets.lower_onnxruntime"
    formats = ("int8", "int4")
    adaptive = True


TARGET = OnnxRuntime()
