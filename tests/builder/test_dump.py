"""`mtpbuild build --dump`: the graph of each program after each pass, and the passes' order."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

from mtpbuild.builder.graph.pipeline import Pipeline
from mtpbuild.builder.targets.inductor import pipeline as inductor
from mtpbuild.builder.targets.onnxruntime import pipeline as onnxruntime
from mtpbuild.builder.targets.onnxruntime.pipeline import CPU
from mtpbuild.builder.targets.passes import Dump
from mtpbuild.builder.targets.tensorrt import pipeline as tensorrt
from mtpbuild.runtime.errors import BuildError
from tests.support.invoke import invoke

GRAPH = torch.fx.Graph()
PIPELINES = {
    name: value
    for module in (inductor, onnxruntime, tensorrt)
    for name, value in vars(module).items()
    if isinstance(value, Pipeline)
}


def test_a_file_for_each_pass(
    smallest: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dump, out = tmp_path / "graphs", tmp_path / "engine"
    flags = ("build", "--model", smallest, "--nextn", 0, "--out", out)
    assert invoke(*flags, "--dump", dump)[0] == 0
    passes, lowered = ([each.name for each in part] for part in (CPU.passes, CPU.lowered_passes))
    names = ["trace", *passes, "export", *lowered]
    stages = [f"{number:02}.{stage}" for number, stage in enumerate(names)]
    files = {path.name: path.read_text() for path in (dump / out.name).iterdir()}
    programs = ("prefill", "decode", "decode_mixed")
    assert files.keys() == {f"{name}.{stage}.txt" for name in programs for stage in stages}
    traced, chained = (files[f"decode.{stage}.txt"] for stage in (stages[0], stages[-1]))
    assert "torch.ops.mtpbuild.mla_rows_write.default" in traced
    assert "Chain" in chained
    assert "LatentRows" in chained

    code, _, err = invoke(*flags, "--dump", dump)
    assert (code, err) == (2, f"error: --dump {dump} is there already: name a new folder\n")
    other = tmp_path / "others"
    assert invoke(*flags, "--dump", other)[0] == 0
    assert f"note: --dump {other}: no program had to be compiled: add --force" in caplog.text
    assert not other.exists()


@pytest.mark.parametrize("name", PIPELINES)
def test_passes_are_functions(name: str) -> None:
    for each in (*PIPELINES[name].passes, *PIPELINES[name].lowered_passes):
        if name == "TENSORRT":
            pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
        assert callable(getattr(import_module(each.module), each.name))


def test_what_cannot_be_dumped(smallest: Path, tmp_path: Path) -> None:
    flags = ("build", "--model", smallest, "--nextn", 0, "--out", tmp_path / "engine")
    code, _, err = invoke(*flags, "--dry-run", "--dump", tmp_path / "graphs")
    says = "needs programs, which --dry-run does not make: drop one of them"
    assert (code, err) == (2, f"error: --dump {tmp_path / 'graphs'} {says}\n")
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match=r"^--dump: .*can't be written \(Not a directory\)$"):
        Dump(tmp_path / "file" / "graphs").write("decode", "trace", torch.fx.GraphModule({}, GRAPH))
