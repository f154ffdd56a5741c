"""Prefixes that are built into an engine, and those that a folder keeps for the next process.

All on a toy whose drafts are often right; the oracle is the same engine where nothing is kept.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpbuild.builder.compiler.prefixes import load_prefix_function, write_manifest, write_prefix
from mtpbuild.builder.compiler.refit import refit
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import Manifest, hash_file, read_manifest
from mtpbuild.runtime.errors import EngineFileError, UsageError
from mtpbuild.runtime.prefix_cache import files as prefix_files
from mtpbuild.runtime.prefix_cache.files import PrefixFile, PrefixFiles, identity, name_prefix_file
from mtpbuild.runtime.prefix_cache.tree import RowSpan
from tests.support.checkpoints import save_checkpoint
from tests.support.engines import EngineBuilder
from tests.support.invoke import invoke
from tests.support.warm_starts import NEXTN, SLOTS, tokens

pytestmark = pytest.mark.xdist_group("predictable")  # another worker would wait for the engine
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0)
DIFFERS = "a warm start differs from a cold one"
BEGINNING = tokens(3, 150)
Said = list[tuple[list[int], list[bool], list[float]]]


@pytest.fixture(scope="module")
def bare(predictable_engine: EngineBuilder) -> Path:
    return predictable_engine(NEXTN, max_batch=SLOTS)


@pytest.fixture
def engine(bare: Path, tmp_path: Path) -> Path:
    """Return a copy with a prefix."""
    folder = tmp_path / "engine"
    shutil.copytree(bare, folder)
    put(folder, "one", BEGINNING)
    return folder


def put(folder: Path, name: str, ids: list[int]) -> None:
    manifest = read_manifest(folder)
    write_prefix(folder, manifest, name, ids, load_prefix_function(folder, manifest, 1)(ids))
    write_manifest(folder, manifest)


def load(folder: Path, **options: Any) -> Engine:
    return Engine.load(folder, **{"threads": 1, "prefix_cache": False} | options)


def keeping(folder: Path, kept: Path, limit: int = 1 << 24) -> Engine:
    """Load an engine that keeps rows in a folder."""
    return load(folder, prefix_cache=True, prefix_cache_dir=kept, prefix_cache_bytes=limit)


def damage(file: Path, flip: int | None = None, keep: int | None = None) -> None:
    """Flip a bit of a byte, or cut the file."""
    data = bytearray(file.read_bytes())
    if flip is not None:
        data[flip] ^= 4
    file.write_bytes(bytes(data[:keep]))


def answer_prompts(engine: Engine, prompts: list[list[int]]) -> tuple[Said, list[int]]:
    """Texts, which of their tokens were drafts, log-probabilities; and what was there before."""
    results = [engine.generate(prompt, PARAMS) for prompt in prompts]
    found: Said = []
    for r in results:
        assert r.logprobs is not None
        found.append((r.token_ids, r.from_draft, [each.logprob for each in r.logprobs]))
    return found, [r.metrics.cached_tokens for r in results]


def check_same(warm: Said, cold: Said) -> None:
    """Assert equal tokens and drafts, and near log-probabilities: the toy has stock operators."""
    assert [(ids, drafts) for ids, drafts, _ in warm] == [(i, d) for i, d, _ in cold], DIFFERS
    for (_, _, one), (_, _, other) in zip(warm, cold, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3, err_msg=DIFFERS)


def prompts() -> list[list[int]]:
    """Return prompts that begin with all of the prefix, with a part of it, and with nothing."""
    cuts = (150, 149, 148, 128, 65, 63, 1, 0)
    return [[*BEGINNING[:cut], *tokens(100 + cut, 5)] for cut in cuts]


def check_prefix(folder: Path, cold: Path) -> None:
    with load(cold) as engine:
        wanted, nothing = answer_prompts(engine, prompts())
    assert set(nothing) == {0}
    with load(folder) as engine:
        found, cached = answer_prompts(engine, prompts())
        check_same(found, wanted)
    assert cached == [150 - 3, 149 - 3, 148 - 3, 128 - 3, 65 - 3, 63 - 3, 0, 0], DIFFERS


def test_a_prompt_begins_behind_a_prefix(engine: Path, bare: Path) -> None:
    check_prefix(engine, bare)


def test_two_prefixes_that_begin_alike(engine: Path, bare: Path) -> None:
    """And rows of earlier prompts beside them; what is forgotten is not the prefix."""
    put(engine, "two", [*BEGINNING[:100], *tokens(9, 70)])
    asked = [*prompts(), [*BEGINNING[:100], *tokens(9, 70), 9, 10]]
    with load(bare) as cold:
        wanted, _ = answer_prompts(cold, asked * 2)
    with load(engine, prefix_cache=True, prefix_cache_bytes=1 << 20) as warm:
        check_same(answer_prompts(warm, asked * 2)[0], wanted)
        warm.reset_prefix_cache()
        assert answer_prompts(warm, asked[:1])[1] == [147]
        assert answer_prompts(warm, asked[-1:])[1] == [167]
        assert warm.stats.prefix_bytes <= 1 << 20


def test_a_prefix_that_may_not_be_read_costs_a_line(
    engine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another user loads the engine without it, whatever is asked to be checked."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(shutil.copytree(engine, Path(place, "engine")))
        Path(place).chmod(0o755)
        with load(folder) as own:  # and imports what another user might not read
            wanted, cached = answer_prompts(own, prompts()[:1])
        assert cached == [147]
        assert invoke("inspect", folder)[0] == 0
        (folder / name_prefix_file("one")).chmod(0)
        with as_another_user():
            for verify in (False, True):
                with load(folder, verify_hashes=verify) as other:
                    found, cached = answer_prompts(other, prompts()[:1])
                assert cached == [0]
                check_same(found, wanted)
                assert caplog.text.count("one.safetensors: not used, as it can't be read") == 1
                caplog.clear()
            assert invoke("inspect", folder)[0] == 0


@contextlib.contextmanager
def as_another_user() -> Iterator[None]:
    """Root may read everything; any other user stays the same."""
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(user)


def test_a_damaged_prefix_costs_a_recomputation_and_a_line(
    engine: Path, bare: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(engine / name_prefix_file("one"), flip=-5)
    with load(bare) as cold, load(engine) as warm:
        found, cached = answer_prompts(warm, prompts())
        check_same(found, answer_prompts(cold, prompts())[0])
    assert set(cached) == {0}
    assert caplog.text.count("damaged (sha256)") == 1
    with pytest.raises(EngineFileError, match="differs from what the build wrote"):
        load(engine, verify_hashes=True)
    for command in (["inspect", engine], ["verify", "--engine", engine, "--against", bare]):
        code, _, err = invoke(*command)
        assert code == 1
        assert (
            "one.safetensors differs from what the build wrote (sha256); copy it again"
            in err.splitlines()[-1]
        )


@pytest.mark.parametrize(("flip", "keep"), [(20, None), (None, -8)], ids=["header", "size"])
def test_a_prefix_whose_header_or_size_is_wrong_is_refused(
    flip: int | None, keep: int | None, engine: Path
) -> None:
    damage(engine / name_prefix_file("one"), flip, keep)
    with pytest.raises(EngineFileError, match=r"one\.safetensors: .*copy it again or rebuild"):
        load(engine)


def test_a_prefix_of_another_engine_is_refused(engine: Path, bare: Path, tmp_path: Path) -> None:
    other = shutil.copytree(bare, tmp_path / "other")
    manifest = read_manifest(other)
    build = manifest.build.model_copy(update={"fingerprint": "of other weights"})
    (other / "prefixes").mkdir()
    shutil.copy(engine / name_prefix_file("one"), other / name_prefix_file("one"))
    write_manifest(other, manifest.model_copy(update={"build": build}))
    with pytest.raises(EngineFileError, match="made for another engine, tokenizer or weights"):
        load(other)
    code, _, err = invoke("inspect", other)
    assert code != 0
    assert "made for another engine" in err


def test_rows_belong_to_all_that_they_depend_on(engine: Path) -> None:
    """To each file but prefixes, such as weights and tokenizer, to the build and the states."""
    manifest = read_manifest(engine)

    def changed(name: str) -> Manifest:
        other = manifest.files[name].model_copy(update={"sha256": "0" * 64})
        return manifest.model_copy(update={"files": manifest.files | {name: other}})

    build = manifest.build.model_copy(update={"fingerprint": "0"})
    others = {name: changed(name) for name in manifest.files}
    others["build"] = manifest.model_copy(update={"build": build})
    others["states"] = manifest.model_copy(update={"state": manifest.state[1:]})
    same = {name for name, other in others.items() if identity(other) == identity(manifest)}
    assert same == {name_prefix_file("one")}


def test_a_file_of_int8_rows(bare: Path, tmp_path: Path) -> None:
    """Each byte comes back, whether it is a value or a part of a scale."""
    manifest, rng = read_manifest(bare), np.random.default_rng(0)
    narrow = [s.model_copy(update={"dtype": "int8"}) for s in manifest.state if s.role == "rows"]
    files = PrefixFiles(manifest.model_copy(update={"state": tuple(narrow)}))
    sizes = {s.name: (5, s.sizes["width"]) for s in narrow}
    rows = {n: rng.integers(-128, 128, size).astype(np.int8) for n, size in sizes.items()}
    span = RowSpan("", 0, tuple(range(5 + files.lookahead)))
    files.write(tmp_path / "rows", span, rows)
    found = files.open(tmp_path / "rows")
    assert found.is_whole
    assert found.span == span
    assert {n: (a.dtype, a.tobytes()) for n, a in found.rows.items()} == {
        n: (a.dtype, a.tobytes()) for n, a in rows.items()
    }


def test_refit_makes_them_anew(engine: Path, predictable: Any, tmp_path: Path) -> None:
    """From their tokens, with the new weights."""
    state = {name: value.clone() for name, value in predictable.state_dict().items()}
    weight = predictable.lm_head.weight.data
    try:
        predictable.lm_head.weight.data = weight * 1.5
        new = save_checkpoint(tmp_path / "new" / "predictable", predictable)
    finally:
        predictable.lm_head.weight.data = weight
        predictable.load_state_dict(state)
    before = read_manifest(engine).files[name_prefix_file("one")]
    _, manifest = refit(engine, str(new))
    assert manifest.files[name_prefix_file("one")].size == before.size
    cold = tmp_path / "cold"
    shutil.copytree(engine, cold)
    shutil.rmtree(cold / "prefixes")
    write_manifest(cold, read_manifest(cold))
    check_prefix(engine, cold)


# A folder that outlives its process.


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def conversation(engine: Engine) -> list[list[int]]:
    """Two turns of three users."""
    asked = []
    for user in range(3):
        prompt = tokens(20 + user, 90 + user)
        answer = engine.generate(prompt, PARAMS).token_ids
        asked += [prompt, [*prompt, *answer, 12, 13]]
        engine.generate(asked[-1], PARAMS)
    return asked


def restart(
    bare: Path, kept: Path, limit: int = 1 << 24
) -> tuple[Said, list[int], list[list[int]]]:
    """Return what a second process says and finds."""
    with keeping(bare, kept, limit) as engine:
        asked = conversation(engine)
    with keeping(bare, kept, limit) as engine:
        found, cached = answer_prompts(engine, asked)
    return found, cached, asked


def check_restart(bare: Path, kept: Path) -> list[int]:
    found, cached, asked = restart(bare, kept)
    with load(bare) as cold:
        check_same(found, answer_prompts(cold, asked)[0])
    return cached


def test_a_folder_survives_a_restart(bare: Path, kept: Path) -> None:
    cached = check_restart(bare, kept)
    assert min(cached) >= 86
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in kept.glob("*.rows")} == {0o600}


def test_a_folder_has_one_process_and_other_peoples_files_stay(bare: Path, kept: Path) -> None:
    kept.mkdir()
    (kept / "notes.txt").write_text("mine")
    (kept / f".{'0' * 64}.rows.half").write_text("half")
    with (
        keeping(bare, kept),
        pytest.raises(UsageError, match="another process keeps its prefixes there"),
    ):
        keeping(bare, kept)
    with keeping(bare, kept) as engine:
        engine.generate(tokens(1, 80), PARAMS)
    assert (kept / "notes.txt").read_text() == "mine"
    assert not [*kept.glob(".*.half")]
    assert [*kept.glob("*.rows")]


def test_a_folder_is_limited(bare: Path, kept: Path) -> None:
    """By what the rows take; each file has a header besides."""
    limit = 40_000
    restart(bare, kept, limit)
    sizes = [path.stat().st_size for path in kept.glob("*.rows")]
    assert 0 < sum(sizes) <= limit + len(sizes) * 4096


DAMAGES: dict[str, dict[str, int]] = {
    "flip": {"flip": -100},
    "header": {"flip": 20},
    "cut": {"keep": -8},
    "empty": {"keep": 0},
}
REST = [pytest.param(name, marks=pytest.mark.full) for name in ("cut", "empty", "swap")]


@pytest.mark.parametrize("kind", ["flip", "header", *REST])
def test_a_damaged_file_costs_a_recomputation_and_a_line(
    kind: str, bare: Path, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with keeping(bare, kept) as engine:
        asked = conversation(engine)
    files = sorted(kept.glob("*.rows"))
    if kind == "swap":
        files[0].write_bytes(files[1].read_bytes())
    else:
        for file in files:
            damage(file, **DAMAGES[kind])
    with load(bare) as cold, keeping(bare, kept) as engine:
        check_same(answer_prompts(engine, asked)[0], answer_prompts(cold, asked)[0])
    assert "removed" in caplog.text or "filled in anew" in caplog.text


def test_salts_survive_too(bare: Path, kept: Path) -> None:
    prompt, own = tokens(5, 90), SamplingParams(max_tokens=2, ignore_eos=True, cache_salt="a")
    cached = []
    for _ in range(2):
        with keeping(bare, kept) as engine:
            cached.append(engine.generate(prompt, own).metrics.cached_tokens)
            for salt in (None, "b"):
                other = SamplingParams(max_tokens=2, ignore_eos=True, cache_salt=salt)
                cached.append(engine.generate(prompt, other).metrics.cached_tokens)
    assert cached[:3] == [0, 0, 0]
    assert min(cached[3:]) > 80
    names = "".join(path.read_bytes().decode("latin-1") for path in kept.glob("*.rows"))
    assert '"salt"' not in names


def another_models_blocks(bare: Path, kept: Path, tmp_path: Path) -> None:
    """Check that an engine of other weights leaves a folder's blocks of equal tokens alone."""
    other = tmp_path / "other"
    shutil.copytree(bare, other)
    manifest = read_manifest(other)
    weights = other / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    values = np.frombuffer(bytes(data[start:]), np.float32) * np.float32(1.25)
    weights.unlink()
    weights.write_bytes(bytes(data[:start]) + values.tobytes())
    spec = manifest.files["weights.safetensors"]
    changed = {"weights.safetensors": spec.model_copy(update={"sha256": hash_file(weights)})}
    write_manifest(other, manifest.model_copy(update={"files": manifest.files | changed}))
    with keeping(bare, kept) as engine:
        asked = conversation(engine)
    with load(other) as cold, keeping(other, kept) as engine:
        check_same(answer_prompts(engine, asked)[0], answer_prompts(cold, asked)[0])


def test_another_models_blocks_are_removed(bare: Path, kept: Path, tmp_path: Path) -> None:
    """What an engine of other weights says with the folder is checked to be what it says cold."""
    another_models_blocks(bare, kept, tmp_path)


def test_another_models_blocks_are_caught(
    bare: Path, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_files, "identity", lambda manifest: "any")
    with pytest.raises(AssertionError, match=DIFFERS):
        another_models_blocks(bare, kept, tmp_path)


def test_half_written_files_are_caught(
    bare: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose rows were not all written yet: zeros stand for them."""
    monkeypatch.setattr(PrefixFile, "is_whole", True)
    with keeping(bare, kept) as engine:
        asked = conversation(engine)
    for file in kept.glob("*.rows"):
        data = file.read_bytes()
        half = 8 + int.from_bytes(data[:8], "little") + 2000
        file.write_bytes(data[:half] + bytes(len(data) - half - 8 * 70) + data[-8 * 70 :])
    with load(bare) as cold, keeping(bare, kept) as engine:
        wanted, found = (answer_prompts(each, asked)[0] for each in (cold, engine))
    with pytest.raises(AssertionError, match=DIFFERS):
        check_same(found, wanted)
