"""The table of changes in docs/architecture.md: its files exist, and toys need none of them."""

import ast
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support.checkpoints import SMALLEST, random_checkpoint
from tests.support.cpu_kernels import compiled

ROOT = Path(__file__).parents[1]
HEADING = "## To change something, open these files"
CODE = ("builder", "lab", "runtime", "plugins", "recipes")
# What other packages could bring, with the words by which the code would have to know each.
TOYS = {
    "target": ("tests/support/toy_target", r"\btoy(_log|_mark)?\b|Toy[A-Z]"),
    "drafter": (
        "tests/support/lookup.py",
        r"\b(lookup|LOOKUP|Lookup)\b(?=[\"':(])|tests\.support\.lookup",
    ),
    "family": ("tests/support/toy_family.py", r"\bToy[A-Z]\w*|\btoy\b"),
    "rule": ("tests/support/typical.py", r"\btypical(_(?!p\b)\w+)?\b|\bTypical"),
}


@cache
def code_of(path: Path) -> str:
    """Read a file's code without comments and docstrings, where a toy may be an example."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        match getattr(node, "body", None):
            case [ast.Expr(ast.Constant(str())) as said, *_]:
                said.value = ast.Constant("")
    return ast.unparse(tree)


def table() -> dict[str, str]:
    """Read the table: a change -> the text beside it."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    _, _, rest = text.partition(HEADING)
    rows = re.findall(r"^\| ([^|]+) \| (.+) \|$", rest.partition("\n## ")[0], re.MULTILINE)
    return {change: files for change, files in rows if change != "change"}


def named(files: str) -> tuple[list[Path], list[str]]:
    """Find a row's paths and its other names; a bare file lies where the path before it does."""
    paths, words, folder = list[Path](), list[str](), ROOT
    for name in re.findall(r"`([^`]+)`", files):
        if "/" in name or name.endswith(".py"):
            paths.append((ROOT if "/" in name else folder) / name)
            folder = paths[-1] if name.endswith("/") else paths[-1].parent
        else:
            words.append(name)
    return paths, words


def test_there_are_rows() -> None:
    assert len(table()) >= 8
    assert {"a new rule of acceptance", "a new target", "a new model family"} <= table().keys()


@pytest.mark.parametrize("change", table())
def test_what_a_row_names_exists(change: str) -> None:
    """Its paths do; a name without a path is in one of the row's files, or is one in a folder."""
    paths, words = named(table()[change])
    assert paths
    assert [path for path in paths if not path.exists()] == []
    files = [path for path in paths if path.is_file()]
    texts = "".join(path.read_text(encoding="utf-8") for path in files)
    folders = [path for path in paths if path.is_dir()]
    for word in words:
        inside = any((folder / word).exists() for folder in folders)
        assert inside or re.search(rf"\b{re.escape(word)}\b", texts), word


@pytest.mark.parametrize("kind", TOYS)
def test_a_toy_needs_no_file_outside_of_the_tests(kind: str) -> None:
    place, words = TOYS[kind]
    assert place in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    own = [ROOT / place] if place.endswith(".py") else [*(ROOT / place).glob("*.py")]
    assert any(re.search(words, code_of(path)) for path in own)
    code = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    assert len(code) > 250
    assert [path for path in code if re.search(words, code_of(path))] == []


# A CPU operator, as docs/architecture.md says: these files are all that it needs.
OPERATOR = {
    "plugins/halve/op.py": '''
"""halve: half of each number."""

import torch
from torch import Tensor

from mtpbuild.plugins.definition import Node, define


@define(lambda x: torch.empty_like(x), Node("Halve", renamed={"times": "count"}))
def halve(x: Tensor, times: int) -> Tensor:
    """Halve x `times` times."""
    return x / 2**times
''',
    "plugins/cpu/source/halve_ops.cpp": """
#include "registry.h"

namespace {

struct Halve : FloatOperator {
  static constexpr const char* name = "Halve";
  static constexpr Operand inputs[] = {FLOAT};
  int64_t count;

  Halve(const Kernels& k, const Attributes& from)
      : FloatOperator(k, from), count(from.integer("count")) {}

  void compute(Call& call) const {
    Tensor x = call.input(0);
    float* y = call.output(x.shape);
    for (int64_t i = 0; i < x.count(); i++) y[i] = x.data<float>()[i] / (int64_t{1} << count);
  }
};

const Registered<Halve> registered;

}  // namespace
""",
}
RUN_OPERATOR = """
import sys
import onnxruntime, torch
from mtpbuild import plugins
from mtpbuild.plugins.halve.op import halve

class Twice(torch.nn.Module):
    def forward(self, x):
        return halve(halve(x, 1), 2)

x = torch.arange(6.0)
exported = torch.export.export(Twice(), (x,))
program = torch.onnx.export(exported, custom_translation_table=plugins.facets(plugins.NODE_FACETS))
assert [node.op_type for node in program.model.graph] == ["Halve", "Halve"]
if len(sys.argv) > 1:
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(sys.argv[1])
    graph = program.model_proto.SerializeToString()
    [y] = onnxruntime.InferenceSession(graph, options).run(None, {"x": x.numpy()})
    assert (torch.from_numpy(y) == x / 8).all()
"""


# A number format of checkpoints, too: one file.
FORMAT = {
    "builder/formats/steps.py": '''
"""Weights in equal steps."""

from mtpbuild.builder.formats.format import Entry, Format, FormatModule


class Steps(Format):
    """Bytes, which count steps of one size from 128 on."""

    name, bits, block = "steps", 8, 1
    suffixes = ("", "_step")

    def parts(self, shape):
        return {"": Entry("U8", shape), "_step": Entry("F32", (1,))}

    def decode(self, parts):
        return (parts[""].float() - 128) * parts["_step"]

    def encode(self, weight, amax=None):
        step = weight.abs().max().reshape(1) / 127
        return {"": (weight / step + 128).round().byte(), "_step": step}


STEPS = Steps()
MODULE = FormatModule(
    find=lambda name, entries, settings: STEPS if f"{name}_step" in entries else None,
    formats=(STEPS,),
)
''',
}
RUN_FORMAT = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from mtpbuild.builder.formats.steps import STEPS
from tests.support.opened import load_model, opened

path = Path(sys.argv[1]) / "model.safetensors"
name, own = "model.layers.0.self_attn.o_proj.weight", "layers.0.self_attn.o_proj"
tensors = load_file(path)
parts = STEPS.encode(tensors[name].float())
save_file(tensors | {name + suffix: part for suffix, part in parts.items()}, path)
model = opened(path.parent)
assert model.dequantised() == {"steps": 1}
held = load_model(path.parent, model.config).get_parameter(own)
assert torch.equal(held, STEPS.decode(parts).T)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return the project with one more operator, and one more format."""
    (tmp_path / "mtpbuild").mkdir()
    for name in ("builder", "plugins"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("lab", "recipes", "runtime"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("builder", "lab", "plugins", "recipes", "runtime"):
        (tmp_path / "mtpbuild" / name).symlink_to(tmp_path / name)
    shutil.copy(ROOT / "mtpbuild" / "__init__.py", tmp_path / "mtpbuild")
    shutil.copy(ROOT / "setup.py", tmp_path)
    for name, text in (OPERATOR | FORMAT).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        assert not (tmp_path / name).exists()
        (tmp_path / name).write_text(text.lstrip(), encoding="utf-8")
    return tmp_path


def run_in(tree: Path, code: str, *arguments: str | Path) -> None:
    places = os.environ | {"PYTHONPATH": f"{tree}:{ROOT}"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=places, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_format_is_one_file(tree: Path) -> None:
    """A checkpoint with a weight in it is read and dequantised."""
    assert len(FORMAT) == 1
    run_in(tree, RUN_FORMAT, random_checkpoint(tree / "checkpoint", **SMALLEST))


@pytest.mark.full
def test_a_cpu_operator_is_two_files(tree: Path) -> None:
    """The op and its node are found in the tree."""
    assert len(OPERATOR) == 2
    run_in(tree, RUN_OPERATOR)


@pytest.mark.full
def test_a_cpu_operator_runs(tree: Path) -> None:
    """Its source is found in the tree, too, and it computes what the reference does."""
    library = compiled(tree / "plugins/cpu/source", tree / "cpu.so", level="-O0")
    run_in(tree, RUN_OPERATOR, library)
