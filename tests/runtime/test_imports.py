"""The run time imports what it may, and exports what it promises."""

import ast
import subprocess
import sys
from pathlib import Path

import mtpbuild.runtime

RUNTIME = Path(mtpbuild.runtime.__file__).parent

NEED_TORCH = {
    *("gpu/torch_cuda.py", "group/channel.py", "group/nccl.py", "programs/aot_package.py"),
    *("programs/inductor_cpu.py", "programs/inductor_cuda.py"),
}

RUN = """
import mtpbuild.runtime
assert "numpy" not in sys.modules, "names are loaded on first use"
from mtpbuild.runtime import *
assert "onnxruntime" not in sys.modules, "only an engine of that target needs it"
from tests.support.fakes import FakePrograms, fake_manifest, fake_tokenizer
manifest = fake_manifest()
with Engine(FakePrograms(manifest), manifest, fake_tokenizer()) as engine:
    prompt = engine.chat_prompt([{"role": "user", "content": "hi"}])
    engine.generate(prompt, SamplingParams(max_tokens=5))
"""


def modules_after(code: str) -> set[str]:
    """Return the modules that a program has imported at its end."""
    root = Path(__file__).parents[2]
    program = [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"]
    done = subprocess.run(program, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_running_needs_neither_torch_nor_transformers() -> None:
    assert not {"torch", "transformers", "onnx", "onnxscript"} & modules_after(RUN)


def test_the_command_line_starts_without_heavy_imports() -> None:
    loaded = modules_after("import mtpbuild.runtime.cli.commands")
    assert not {"numpy", "pydantic", "tokenizers", "torch"} & loaded


def test_the_run_time_imports_neither_builder_nor_lab_nor_plugins() -> None:
    """It imports torch nowhere but where it is needed."""
    others, need_torch = {"builder", "lab", "plugins"}, set[str]()
    for path in sorted(RUNTIME.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                package, *rest = name.split(".")
                assert package not in {"transformers", *others}, path
                assert package != "mtpbuild" or not others & set(rest[:1]), path
                assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative"
                if package == "torch":
                    need_torch.add(path.relative_to(RUNTIME).as_posix())
    assert need_torch == NEED_TORCH


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
