"""What an engine's operators of ours are given, and what they make of it, while it runs."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.cpu_library import DOMAIN
from mtpbuild.runtime.programs import onnxruntime as programs
from tests.support.cpu_chains import apart
from tests.support.cpu_host import Case

HEARD = "heard."
TOKENS, RUNS = 12, 3


def calls(
    engine: Path, prompt: list[int], patch: pytest.MonkeyPatch, *, chains: bool
) -> list[Case]:
    """Return the calls of each program's first runs; the engine's graphs are written anew.

    chains: as they are; otherwise each of their steps is a call.
    """
    heard: list[Case] = []

    class Listening(programs.OnnxPrograms):
        """A backend whose graphs return what their nodes of ours read and write."""

        def __init__(self, *given: Any) -> None:
            self._graphs: dict[str, onnx.ModelProto] = {}
            self._left: dict[str, int] = {}
            super().__init__(*given)

        def _open_session(self, program: str) -> Any:
            path = self._folder / self._programs[program].file
            model = self._graphs[program] = onnx.load(path, load_external_data=False)
            self._left[program] = RUNS
            if not chains:
                apart(model.graph)
            _listen(model.graph)
            onnx.save(model, path)
            return super()._open_session(program)

        def _bind(self, program: str, *given: Any) -> Any:
            binding = super()._bind(program, *given)
            for name in _names(self._graphs[program].graph):
                binding.bind_output(HEARD + name)
            return binding

        def _run(self, binding: Any, program: str) -> None:
            super()._run(binding, program)
            if self._left[program] == 0:
                return
            self._left[program] -= 1
            graph = self._graphs[program].graph
            names, outputs = _names(graph), binding.copy_outputs_to_cpu()
            values = dict(zip(names, outputs[len(outputs) - len(names) :], strict=True))
            values |= {name: value.numpy() for name, value in self._weights.items()}
            values |= {
                each.name: numpy_helper.to_array(each, str(self._folder))
                for each in graph.initializer
                if each.name not in self._weights
            }
            heard.extend(_case(node, values) for node in graph.node if node.domain == DOMAIN)

    patch.setattr(programs, "OnnxPrograms", Listening)
    patch.setattr(programs, "_are_listed", lambda spec, session: True)  # it has more outputs now
    with Engine.load(engine, threads=1, prefix_cache=False) as loaded:
        loaded.generate(prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=1))
    return heard


def _names(graph: onnx.GraphProto) -> list[str]:
    """Return what nodes of ours read and write, without weights."""
    weights = {each.name for each in graph.initializer}
    nodes = [node for node in graph.node if node.domain == DOMAIN]
    both = [name for node in nodes for name in (*node.input, *node.output)]
    return [name for name in dict.fromkeys(both) if name and name not in weights]


def _listen(graph: onnx.GraphProto) -> None:
    for name in _names(graph):
        graph.node.append(helper.make_node("Identity", [name], [HEARD + name]))
        graph.output.append(helper.make_empty_tensor_value_info(HEARD + name))


def _case(node: onnx.NodeProto, values: dict[str, NDArray[Any]]) -> Case:
    """Return a copy: caches are written over by the next run."""

    def value(name: str) -> NDArray[Any] | None:
        return np.array(values[name]) if name else None

    values_of = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    attributes = {n: v.decode() if isinstance(v, bytes) else v for n, v in values_of.items()}
    results = [*map(value, node.output)]
    types = [str(array.dtype) for array in results if array is not None]
    return Case(node.op_type, attributes, [*map(value, node.input)], results, types)
