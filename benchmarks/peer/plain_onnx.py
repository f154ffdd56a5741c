"""Runs an ordinary ONNX export of the model, without mtpbuild's step program.

    python plain_export.py CHECKPOINT MODEL.onnx
    python plain_onnx.py MODEL.onnx THREADS

The host passes all keys and values to the graph, gets them back longer, and takes the argmax.
"""

import sys
from collections.abc import Iterator
from typing import Any

from worker import Generate, serve


def load() -> Generate:
    import numpy as np
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = int(sys.argv[2])
    session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
    inputs = session.get_inputs()
    empty = {i.name: np.zeros((*i.shape[:2], 0, i.shape[3]), np.float32) for i in inputs[1:]}

    def generate(prompt: list[int], count: int) -> Iterator[list[int]]:
        feed: dict[str, Any] = {"tokens": np.array([prompt]), **empty}
        for _ in range(count):
            logits, *present = session.run(None, feed)
            newest = int(logits[0, -1].argmax())
            feed = dict(zip(empty, present, strict=True)) | {"tokens": np.array([[newest]])}
            yield [newest]

    return generate


serve(load)
