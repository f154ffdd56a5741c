"""The run time imports what it may, and exports what it promises."""

import ast
import subprocess
import sys
from pathlib import Path

import mtpbuild.runtime

RUNTIME = Path(mtpbuild.runtime.__file__).parent

NEED_TORCH = {"aot_package", "channel", "nccl", "one_shot", "torch_cuda"}

RUN = """
import sys
import mtpbuild.runtime
assert "numpy" not in sys.modules, "names are loaded on first use"
from mtpbuild.runtime import *
assert "onnxruntime" not in sys.modules, "only an engine of that target needs it"
from tests.support.fakes import FakePrograms, fake_manifest, fake_tokenizer
manifest = fake_manifest()
with Engine(FakePrograms(manifest), manifest, fake_tokenizer()) as engine:
    prompt = engine.chat_prompt([{"role": "user", "content": "hi"}])
    engine.generate(prompt, SamplingParams(max_tokens=5))
heavy = {"torch", "transformers", "onnx", "onnxscript"} & set(sys.modules)
assert not heavy, heavy
"""


def run_python(code: str) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_running_needs_neither_torch_nor_transformers() -> None:
    run_python(RUN)


def test_the_command_line_starts_without_heavy_imports() -> None:
    run_python(
        "import sys, mtpbuild.runtime.cli.commands\n"
        "heavy = {'numpy', 'pydantic', 'tokenizers', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )


def test_the_run_time_imports_neither_builder_nor_lab_nor_plugins() -> None:
    """It imports torch nowhere but in the programs of the target that needs it, inductor."""
    for path in sorted(RUNTIME.rglob("*.py")):
        heavy = {"transformers", "builder", "lab", "plugins"}
        if path.stem not in NEED_TORCH and not path.stem.startswith("inductor"):
            heavy.add("torch")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                parts = name.split(".")
                assert parts[0] not in heavy, path
                assert parts[:2] not in [
                    ["mtpbuild", name] for name in ("builder", "lab", "plugins")
                ], path
                assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative"


def test_exports() -> None:
    assert mtpbuild.runtime.__all__ == [
        "AsyncChatStream", "ChatChunk", "ChatResult", "ChatStream", "Chunk", "DeadlineError",
        "Engine", "EngineError", "EngineStats", "Manifest", "MtpbuildError", "Observer",
        "RequestError", "RequestMetrics", "Result", "SamplingParams", "SpeculativeDecoding",
        "Stream", "StructuredOutputs", "TokenLogprobs", "Tokenizer", "Trace",
    ]  # fmt: skip
    assert dir(mtpbuild.runtime) == mtpbuild.runtime.__all__
    for name in mtpbuild.runtime.__all__:
        assert getattr(mtpbuild.runtime, name).__name__ == name
