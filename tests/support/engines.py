"""Helpers for engine directories in tests: placeholders, manifests, and a real engine's tokens."""

from collections.abc import Callable
from pathlib import Path

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import MANIFEST, FileSpec, Manifest, ProgramSpec, hash_file
from tests.support.fakes import TEMPLATE, backend_tokenizer

EngineBuilder = Callable[..., Path]


def greedy_ids(engine: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Return the next `count` token ids of each prompt, not stopping at EOS."""
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    with Engine.load(engine, threads=1, prefix_cache=False) as loaded:
        results = loaded.generate(prompts, params)
    return [list(result.token_ids) for result in results]


def write_engine(folder: Path, manifest: Manifest, *, tokenizer: bool = True) -> Manifest:
    """Write an engine directory whose programs are placeholders."""
    folder.mkdir()
    for name in ("prefill.onnx", "decode.onnx", "weights.safetensors"):
        (folder / name).write_bytes(name.encode() * 100)
    if tokenizer:
        (folder / "tokenizer.json").write_text(backend_tokenizer().to_str(), encoding="utf-8")
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        (folder / "generation_config.json").write_text('{"eos_token_id": 1}', encoding="utf-8")
    return write_manifest(folder, manifest)


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Write engine.json, listing the files that are there; a fake's programs are placeholders."""
    programs = manifest.programs or {
        name: ProgramSpec(file=f"{name}.onnx", inputs=(), outputs=())
        for name in ("prefill", "decode")
    }
    files = {
        path.name: FileSpec(size=path.stat().st_size, sha256=hash_file(path))
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }
    manifest = manifest.model_copy(update={"files": files, "programs": programs})
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return manifest
