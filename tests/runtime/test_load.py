"""Engine directories that can't be run: always a typed error, whatever the damage."""

import json
import platform
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtpbuild.runtime import Engine, EngineError, MtpbuildError, SamplingParams, cpu_library
from mtpbuild.runtime.contract.manifest import MANIFEST, PROBE_VERSION, Manifest, read_manifest
from mtpbuild.runtime.errors import (
    ContextLengthError,
    EngineFileError,
    EngineFormatError,
    UsageError,
)
from tests.support.damage import damage
from tests.support.engines import write_manifest
from tests.support.fakes import BOS, FakePrograms, continuation
from tests.support.invoke import invoke
from tests.support.registry import programs_by


def test_a_whole_engine_loads_and_runs(engine_dir: Path) -> None:
    with Engine.load(engine_dir, threads=1, verify_hashes=True) as engine:
        found = engine.generate("hello", SamplingParams(max_tokens=3)).token_ids
        assert found == continuation(engine.encode("hello"), 3)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, seed=5)])
def test_warming_up_runs_the_programs_and_counts_nothing(
    engine_dir: Path, params: SamplingParams
) -> None:
    made = list[FakePrograms]()

    def programs(manifest: Manifest) -> FakePrograms:
        made.append(FakePrograms(manifest))
        return made[0]

    with programs_by(programs), Engine.load(engine_dir, warm=[params]) as engine:
        assert made[0].turns == ["c", "s"]
        assert made[0].controls[0].temperature == params.temperature
        assert engine.stats.output_tokens == engine.stats.requests_ended == 0
        found = engine.generate("hello", SamplingParams(max_tokens=9)).token_ids
        assert found == continuation(engine.encode("hello"), 9)


def test_a_smaller_context(engine_dir: Path) -> None:
    """It counts for prompts and for answers; the files stay as they are."""
    with Engine.load(engine_dir, max_seq_len=20) as engine:
        assert engine.manifest.build.max_seq_len == 20
        with pytest.raises(ContextLengthError, match="20 tokens, this engine takes at most 19"):
            engine.generate([5] * 20)
        found = engine.generate([5] * 15, SamplingParams(max_tokens=30, ignore_eos=True))
        assert (len(found.token_ids), found.finish_reason) == (5, "length")
    built = read_manifest(engine_dir).build.max_seq_len
    says = f"max_seq_len must be from 7 to {built}, for which this engine was built, not"
    for wrong in (built + 1, 6, -1):
        with pytest.raises(UsageError, match=f"{says} {wrong}"):
            Engine.load(engine_dir, max_seq_len=wrong)
    Engine.load(engine_dir, max_seq_len=built).close()


def test_loading_is_logged(engine_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "mtpbuild"):
        Engine.load(engine_dir).close()
    assert caplog.messages[0] == f"loaded {engine_dir}: onnxruntime, nextn 3"


@pytest.mark.parametrize(
    ("system", "machine", "output"),
    [
        ("Linux", "x86_64", ""),
        ("Linux", "aarch64", "kernels have run on an emulated ARM processor alone; `mtpbuild ver"),
        ("Darwin", "arm64", "kernels have never run on macOS; `mtpbuild verify` checks an engine"),
        ("Windows", "AMD64", "kernels have never run on Windows; "),
    ],
)
def test_where_kernels_were_not_tried(
    system: str,
    machine: str,
    output: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first engine that is loaded there says so, once."""
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    cpu_library._say_where_untried.cache_clear()
    for _ in range(2):
        assert cpu_library.find_library_for(cpu_library.LAYOUT, Path("engine")).is_file()
    cpu_library._say_where_untried.cache_clear()
    assert len(caplog.messages) == bool(output)
    assert output in caplog.text


def with_states(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest's JSON with a cache and a window, which programs read and write."""
    states = [
        ("kv.0", "rows", {"batch": 1, "head": 1, "rows": raw["build"]["capacity"], "width": 8}),
        ("window", "carry", {"batch": 1, "window": raw["build"]["nextn"] + 1}),
    ]
    raw["state"] = [
        {"name": name, "role": role, "dtype": "float32", "sizes": sizes}
        for name, role, sizes in states
    ]
    for program in raw["programs"].values():
        for suffix, tensors in (("", "inputs"), (".out", "outputs")):
            program[tensors] = [
                {"name": name + suffix, "dtype": "float32", "shape": [*sizes.values()]}
                for name, _, sizes in states
            ]
    ahead = {"name": "ahead", "dtype": "int64", "shape": [1, raw["lookahead"]]}
    raw["programs"]["prefill"]["inputs"].append(ahead)
    return raw


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda raw: raw["build"].update(nextn=1), "state window: window 4 contradicts the rest"),
        (lambda raw: raw["build"].update(max_batch=2), "state kv.0: batch 1 contradicts"),
        (lambda raw: raw["build"].update(capacity=70), "state kv.0: rows 68 contradicts"),
        (lambda raw: raw["build"].update(max_seq_len=100), "lookahead or capacity does not fit"),
        (lambda raw: raw.update(lookahead=0), "lookahead 0 is not that of its programs"),
        (lambda raw: raw["model"].update(vocab_size=-1), "model.vocab_size: .* greater than"),
        (lambda raw: raw["state"][0]["sizes"].update(width=1 << 40), "state kv.0: width"),
        (lambda raw: raw["state"][0]["sizes"].update(width=-1), "state kv.0: width -1"),
        (lambda raw: raw["state"][0]["sizes"].update(width=9), "programs.*: kv.0 is not the state"),
        (lambda raw: raw["state"][1].update(name="kv.0"), "two states have one name"),
        (lambda raw: raw["programs"].pop("decode"), "programs: there is no decode"),
        (lambda raw: raw["programs"]["decode"]["inputs"].pop(0), "programs.decode: other states"),
        (lambda raw: raw["programs"]["decode"]["outputs"].pop(0), "programs.decode: other states"),
    ],
)  # fmt: skip
def test_a_manifest_that_contradicts_itself(
    engine_dir: Path, change: Callable[[dict[str, Any]], object], line: str
) -> None:
    edit(engine_dir, with_states)
    Engine.load(engine_dir).close()
    edit(engine_dir, change)
    with pytest.raises(EngineFormatError, match=f"engine.json: {line}.*; rebuild the engine$"):
        Engine.load(engine_dir)


@pytest.mark.parametrize(("version", "exact"), [(1, False), (PROBE_VERSION, True)])
def test_an_older_probe_counts_as_none(
    engine_dir: Path, version: int, exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    edit(engine_dir, lambda raw: raw["build"].update(exact=True, probe_version=version))
    with Engine.load(engine_dir) as engine:
        assert engine.manifest.build.counts_as_exact == exact
    note = f"counts as not exact: probe version 1 found it exact, this mtpbuild has {PROBE_VERSION}"
    assert (note in caplog.text) != exact
    shown = " ".join(invoke("inspect", engine_dir)[1].split())
    assert ("counts as not exact" in shown) != exact


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(EngineFormatError, match="no such engine directory"):
        Engine.load(tmp_path / "nothing")
    with pytest.raises(EngineFormatError, match=r"not an engine .*; make one with"):
        Engine.load(tmp_path)


def test_a_name_of_an_engine_is_not_its_path(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked for in `engines`; one that is misspelt beside what stands there."""
    monkeypatch.chdir(engine_dir.parent)
    shutil.copytree(engine_dir, Path("engines", "tiny_n3"))
    shutil.copytree(engine_dir, Path("engines", ".bench", "tiny_n2"))
    for name in ("tiny_n3", "tiny_n2", "engines/tiny_n1", "engines"):
        with pytest.raises(EngineFormatError, match=r"; did you mean engines/tiny_n3\?$"):
            read_manifest(Path(name))
    with pytest.raises(EngineFormatError, match=r"; did you mean fake_n3\?$"):
        read_manifest(Path("fake_n2"))


def test_files_are_checked(engine_dir: Path) -> None:
    weights = engine_dir / "weights.safetensors"
    weights.write_bytes(b"X" + weights.read_bytes()[1:])
    says = r"differs from what the build wrote .*; copy it again or"
    with pytest.raises(EngineFileError, match=says):
        Engine.load(engine_dir)
    weights.write_bytes(b"X")
    with pytest.raises(EngineFileError, match=r"1 bytes, the manifest says .*; copy it again or"):
        Engine.load(engine_dir)
    weights.unlink()
    with pytest.raises(EngineFileError, match=r"weights.safetensors is missing; copy it again or"):
        Engine.load(engine_dir)


def test_foreign_files_and_dangling_links_are_refused(engine_dir: Path) -> None:
    foreign = engine_dir / "extra.bin"
    foreign.write_bytes(b"")
    with pytest.raises(EngineFileError, match=r"extra.bin is not part of the engine"):
        Engine.load(engine_dir)
    foreign.unlink()
    (engine_dir / "decode.onnx").unlink()
    (engine_dir / "decode.onnx").symlink_to("nowhere")
    with pytest.raises(EngineFileError, match="can't be read"):
        Engine.load(engine_dir)


@pytest.mark.parametrize(
    ("version", "advice"),
    [*((version, "build it again") for version in (0, 2, 3, "4", None)), (5, "upgrade mtpbuild")],
)
def test_other_format_versions_are_refused(engine_dir: Path, version: object, advice: str) -> None:
    edit(engine_dir, lambda raw: raw.update(format_version=version))
    with pytest.raises(EngineFormatError, match=f"this mtpbuild reads 4; {advice}$"):
        Engine.load(engine_dir)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("tokenizer.json", "{}", "not a tokenizer"),
     ("tokenizer.json", '{"version": "1.0", "model": 5}', "not a tokenizer"),
     ("chat_template.jinja", b"\xff\xfe", "not UTF-8"), ("tokenizer_config.json", "{", "not JSON"),
     ("tokenizer_config.json", "[]", "not a JSON object")],
)  # fmt: skip
def test_damage_with_the_right_hash(
    engine_dir: Path, name: str, content: str | bytes, message: str
) -> None:
    data = content.encode() if isinstance(content, str) else content
    (engine_dir / name).write_bytes(data)
    write_manifest(engine_dir, read_manifest(engine_dir))
    with pytest.raises(EngineFileError, match=message):
        Engine.load(engine_dir)


def test_a_tokenizer_that_is_not_byte_level_is_refused(engine_dir: Path) -> None:
    path = engine_dir / "tokenizer.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    path.write_text(json.dumps(raw), encoding="utf-8")
    write_manifest(engine_dir, read_manifest(engine_dir))
    with pytest.raises(EngineFileError, match="decoder WordPiece is not supported"):
        Engine.load(engine_dir)


@pytest.mark.parametrize("bos", ["<s>", {"content": "<s>", "special": True}])
@pytest.mark.parametrize("processor", [True, False])
def test_tokenizer_config_decides_on_the_bos(
    engine_dir: Path, bos: object, processor: bool
) -> None:
    path = engine_dir / "tokenizer.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    if not processor:
        raw["post_processor"] = None
    path.write_text(json.dumps(raw), encoding="utf-8")
    config = {"bos_token": bos, "eos_token": None, "add_bos_token": True}
    (engine_dir / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    write_manifest(engine_dir, read_manifest(engine_dir))
    engine = Engine.load(engine_dir)
    with_bos, without = engine.encode("a"), engine.encode("a", add_special_tokens=False)
    assert with_bos == [BOS, *without]
    assert engine.encode("<s>a") == with_bos


def test_a_damaged_chat_template_names_its_line(engine_dir: Path) -> None:
    (engine_dir / "chat_template.jinja").write_text("fine\n{% if %}", encoding="utf-8")
    write_manifest(engine_dir, read_manifest(engine_dir))
    with pytest.raises(EngineFileError, match=r"chat_template.jinja: line 2"):
        Engine.load(engine_dir).chat_prompt([{"role": "user", "content": "hi"}])


def test_programs_that_fail_to_load_are_a_typed_error(engine_dir: Path) -> None:
    def broken(manifest: Manifest) -> FakePrograms:
        raise IndexError("no caches")

    says = r"can't be loaded \(IndexError: no caches"
    with programs_by(broken), pytest.raises(EngineError, match=says):
        Engine.load(engine_dir)


def edit(folder: Path, change: Any) -> None:
    raw = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    change(raw)
    (folder / MANIFEST).write_text(json.dumps(raw), encoding="utf-8")


@pytest.mark.usefixtures("fake_target")
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_damage_is_a_typed_error_or_harmless(engine_dir: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "engine"
        shutil.copytree(engine_dir, folder)
        for _ in range(data.draw(st.integers(1, 3))):
            damage(folder, data)
        try:
            with Engine.load(folder) as engine:
                engine.generate([5], SamplingParams(max_tokens=2))
        except MtpbuildError:
            return
        assert isinstance(read_manifest(folder), Manifest)
