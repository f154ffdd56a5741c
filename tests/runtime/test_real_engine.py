"""The run time on a built engine: what fakes can't show."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtpbuild.runtime import Engine, MtpbuildError, SamplingParams
from tests.support.damage import damage

pytestmark = pytest.mark.xdist_group("tiny")  # another worker would wait for the same engines
TinyEngine = Callable[[int], Path]  # nextn -> engine directory of deepseek-tiny

PROMPT = "def fibonacci(n):"
RUN = """
import sys
from mtpbuild.runtime import Engine, SamplingParams
with Engine.load(sys.argv[1]) as engine:
    assert engine.generate("def f(x):", SamplingParams(max_tokens=9)).token_ids
heavy = {"torch", "transformers", "onnx", "onnxscript"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.fixture
def n3(tiny_engine: TinyEngine) -> Path:
    return tiny_engine(3)


def test_a_built_engine_needs_neither_torch_nor_transformers(n3: Path) -> None:
    done = subprocess.run([sys.executable, "-c", RUN, str(n3)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_capacity_ends_a_request(n3: Path) -> None:
    with Engine.load(n3) as engine:
        capacity = engine.manifest.build.max_seq_len
        prompt = [5 + i % 50 for i in range(capacity - 6)]
        result = engine.generate(prompt, SamplingParams(max_tokens=999, ignore_eos=True))
    assert len(result.token_ids) == 6
    assert result.finish_reason == "length"


def test_the_command_line(n3: Path) -> None:
    command = Path(sys.executable).parent / "mtpbuild"
    flags = ["--engine", str(n3), "--prompt", PROMPT, "--max-tokens", "16", "--json"]
    done = subprocess.run([command, "run", *flags], check=True, capture_output=True, text=True)
    [line] = done.stdout.splitlines()
    assert json.loads(line)["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3
    subprocess.run([command, "inspect", str(n3)], check=True, stdout=subprocess.DEVNULL)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_damage_is_a_typed_error_or_harmless(n3: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory(dir=n3.parent) as scratch:
        folder = Path(scratch) / "engine"
        shutil.copytree(n3, folder, copy_function=os.link)  # `damage` replaces, never rewrites
        damage(folder, data)
        output, tokens = "", []
        try:
            with Engine.load(folder) as engine:
                tokens = engine.generate([5], SamplingParams(max_tokens=2)).token_ids
        except MtpbuildError as error:
            output = str(error)
        assert bool(output) != bool(tokens)
        assert "\n" not in output
