"""Engines of several ranks: processes that meet over torch.distributed, and how they end.

Two ranks run their programs eagerly (`tests/support/eager_ranks.py`); compiled ones, and the larger
matrix, are in `test_ranks_compiled.py`.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mtpbuild.builder.compiler.dry_run import dry_run
from mtpbuild.builder.engine import layout
from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.stages import Stages
from mtpbuild.runtime import Engine, EngineError
from mtpbuild.runtime.contract.manifest import MANIFEST, read_manifest
from mtpbuild.runtime.errors import RankError, RequestFailedError, UsageError
from mtpbuild.runtime.group import start as ranks_module
from mtpbuild.runtime.group.start import build_command, start_ranks
from mtpbuild.runtime.limits import measure_limits
from mtpbuild.runtime.prefix_cache.cache import open_prefix_cache
from mtpbuild.runtime.programs.follow import follow
from tests.reference.recompute import greedy
from tests.reference.sampling import check_texts
from tests.support import eager_ranks, rank_bugs
from tests.support.checkpoints import make_predictable, save_checkpoint
from tests.support.fakes import fake_manifest
from tests.support.invoke import invoke
from tests.support.rank_engines import (
    GREEDY,
    HOT,
    NEXTN,
    PROMPT,
    RELAXED,
    SHAPE,
    followers,
    make,
    request_and_build,
    running,
)
from tests.support.requests import build_request
from tests.support.stand_ins import failing

pytestmark = [
    pytest.mark.xdist_group("inductor"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch's own, in export and gloo
]


DIFFERS = "a warm start differs from a cold one"


@pytest.fixture(scope="module")
def eagerly() -> Iterator[None]:
    with eager_ranks.in_place_of_the_compiler():
        yield


@pytest.fixture(scope="module")
def model() -> PlainDeepseek:
    return make_predictable(**SHAPE)


@pytest.fixture(scope="module")
def checkpoint(model: PlainDeepseek, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("ranks") / "shared", model, **SHAPE)


@pytest.fixture(scope="module")
def engine(eagerly: None, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engines") / "tp2"
    for rank in (1, 0):  # as on two machines, but for the programs: the second takes the first's
        make(checkpoint, out, tp=2, rank=rank)
    return out


@pytest.fixture(scope="module")
def undrafted(eagerly: None, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a smaller one; `engine` is for what drafts change."""
    return make(checkpoint, tmp_path_factory.mktemp("engines") / "n0", 0, drafter=None, tp=2)


def test_tokens(undrafted: Path, model: PlainDeepseek) -> None:
    """O2, greedy and sampled, one after the other; twice the same."""
    with running(undrafted) as loaded:
        check_texts(loaded, model, [PROMPT, [5], PROMPT, PROMPT], [GREEDY, GREEDY, HOT, GREEDY])
        (follower,) = followers()
    assert not followers(), "no zombie"
    assert not Path(f"/proc/{follower}").exists()


@pytest.mark.full
def test_tokens_with_drafts(engine: Path, model: PlainDeepseek) -> None:
    """The same with drafts and penalties; relaxed runs too."""
    asked = [PROMPT, [5], PROMPT, PROMPT, PROMPT]
    penalised = replace(HOT, presence_penalty=1.0, repetition_penalty=1.3)
    with running(engine) as loaded:
        results = check_texts(loaded, model, asked, [GREEDY, GREEDY, HOT, GREEDY, penalised])
        assert len(loaded.generate(PROMPT, RELAXED).token_ids) == 16
    drafting = results[0].metrics.speculative_decoding
    assert 0 < drafting.num_accepted_draft_tokens < drafting.num_draft_tokens


def check_pool(folder: Path, model: PlainDeepseek) -> None:
    """Two users take turns in one slot; the second turn begins behind the first, on all ranks."""
    asked = [[9 + (n * n + user) % 50 for n in range(70 + user)] for user in (1, 2)]
    params = replace(GREEDY, max_tokens=8, logprobs=0)
    with running(folder, prefix_cache=True) as loaded:
        for known in (0, 1):
            results = [loaded.generate(prompt, params) for prompt in asked]
            cached = [result.metrics.cached_tokens for result in results]
            assert cached == [known * (len(prompt) - 3) for prompt in asked]
            prompts, turns = asked, zip(asked, results, strict=True)
            asked = [[*prompt, *result.token_ids, 7, 9] for prompt, result in turns]
        for prompt, warm in zip(prompts, results, strict=True):
            loaded.reset_prefix_cache()
            cold = loaded.generate(prompt, params)
            assert warm.token_ids == greedy(model, prompt, 8), DIFFERS
            assert warm.from_draft == cold.from_draft, DIFFERS
            given, wanted = ([t.logprob for t in r.logprobs or ()] for r in (warm, cold))
            assert given == pytest.approx(wanted, abs=1e-4), DIFFERS
            loaded.generate(prompt, params)
        assert 0 < loaded.stats.prefix_bytes <= loaded.stats.prefix_limit
        with pytest.raises(UsageError, match="prefix_cache_dir needs an engine of one rank"):
            open_prefix_cache(
                loaded._loaded.loop.programs, loaded.manifest, folder, None, folder / "kept"
            )


@pytest.mark.full
def test_a_pool(engine: Path, model: PlainDeepseek) -> None:
    check_pool(engine, model)


@pytest.mark.full
def test_a_pool_of_which_a_rank_takes_nothing(
    engine: Path, model: PlainDeepseek, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(rank_bugs.BUG, "loads_no_rows")
    with pytest.raises(AssertionError, match=DIFFERS):
        check_pool(engine, model)


@pytest.mark.full
@pytest.mark.parametrize("rank", [1, 0])
def test_a_request_that_one_rank_fails_at(
    engine: Path, model: PlainDeepseek, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """All ranks drop it in the same step and others go on; later prompts begin with its rows."""
    if rank == 0:
        rank_bugs.fails_at_requests(monkeypatch)
    else:
        monkeypatch.setenv(rank_bugs.BUG, rank_bugs.fails_at_requests.__name__)
    with running(engine, prefix_cache=True) as loaded:
        other = loaded.stream(PROMPT, GREEDY)
        next(other)
        cache = loaded._loaded.loop.prefix_cache
        assert cache is not None
        assert not [*cache.tree.entries()], "rows that one rank could not keep, none has"
        with pytest.raises(RequestFailedError, match="the request failed: "):
            loaded.generate([*PROMPT, rank_bugs.UNLUCKY], GREEDY)
        assert other.result().token_ids == greedy(model, PROMPT, 16)
        result = loaded.generate(PROMPT, GREEDY)
        assert result.token_ids == greedy(model, PROMPT, 16)
        assert result.metrics.cached_tokens
        assert loaded.failure is None


@pytest.mark.full
def test_the_folder(engine: Path, checkpoint: Path) -> None:
    """Each rank holds its share, one copy of the programs; building again changes nothing."""
    manifest = read_manifest(engine)
    assert (manifest.build.tp, manifest.build.ep, manifest.rank) == (2, 1, None)
    assert "weights.safetensors" not in manifest.files
    first, second = (engine / f"rank{rank}" for rank in range(2))
    whole = sum(p.numel() for p in make_predictable(**SHAPE).parameters()) * 4
    for rank, folder in enumerate((first, second)):
        own = read_manifest(folder)
        assert own.rank == rank
        assert own.build == manifest.build
        assert 0.5 * whole < (folder / "weights.safetensors").stat().st_size < 0.8 * whole
    assert (first / "decode.pt2").samefile(second / "decode.pt2")
    weights = [(folder / "weights.safetensors").read_bytes() for folder in (first, second)]
    assert weights[0] != weights[1]
    again = request_and_build(checkpoint, engine, tp=2)
    assert again.unchanged
    files = {p for p in engine.rglob("*") if p.is_file() and p.name != MANIFEST}
    assert sum(again.list_file_sizes()) == sum(p.stat().st_size for p in files)
    code, out, _ = invoke("inspect", engine)
    assert code == 0
    assert re.search(r"ranks +2\b", out)
    done = dry_run(build_request(checkpoint, (NEXTN,), target="inductor", tp=2), Stages())
    assert 0.5 * whole < done.engines[0].weight_file_bytes < 0.8 * whole
    assert done.engines[0].folder == Path("engines/shared_n2_tp2")


@pytest.mark.parametrize(("number", "idle"), [(signal.SIGKILL, 0.0), (signal.SIGSTOP, 6.0)])
@pytest.mark.full
def test_rank_0_dies_or_hangs(engine: Path, number: signal.Signals, idle: float) -> None:
    """The others notice, also while nothing runs; to wait is no failure."""
    code = (
        "import sys, time, torch\nfrom pathlib import Path\n"
        "from tests.support import eager_ranks, rank_engines\ntorch.set_num_threads(1)\n"
        "with eager_ranks.used(), rank_engines.running(Path(sys.argv[1])):\n"
        "    print(rank_engines.followers()[0], flush=True)\n    time.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(eager_ranks.ROOT), ranks_module.TIMEOUT: "5"}
    command = [sys.executable, "-c", code, str(engine)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        follower = int(leader.stdout.readline())
        time.sleep(idle)
        assert alive(follower)
        leader.send_signal(number)
        end = time.monotonic() + 10
        while alive(follower) and time.monotonic() < end:
            time.sleep(0.05)
        leader.kill()
    assert not alive(follower)


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.full  # test_headline_inductor.py asks so too
def test_the_command(engine: Path, model: PlainDeepseek, tmp_path: Path) -> None:
    """Any way to ask: rank 0 alone reads and writes."""
    requests = tmp_path / "requests.jsonl"
    lines = [{"input_ids": PROMPT, "output_tokens": n} for n in (9, 4)]
    requests.write_text("\n".join(map(json.dumps, lines)))
    flags = ("--input", requests, "--ignore-eos", "--json", "--trace", tmp_path / "steps.jsonl")
    code, out, err = invoke("run", "--engine", engine, *flags)
    assert (code, err) == (0, "")
    found = [json.loads(line)["token_ids"] for line in out.splitlines()]
    assert found == [greedy(model, PROMPT, 9), greedy(model, PROMPT, 4)]


@pytest.mark.full
def test_a_rank_that_sees_other_tokens(engine: Path) -> None:
    says = "^rank 1 got other tokens than rank 0"

    def see_others(loaded: Engine) -> None:
        loaded.generate(PROMPT, GREEDY)
        loaded._loaded.loop.programs._channel.digest += 1  # type: ignore[attr-defined]
        loaded.generate(PROMPT, GREEDY)

    with pytest.raises(RankError, match=says), running(engine) as loaded:
        see_others(loaded)


@pytest.mark.full
def test_a_failed_engine_stays_failed(engine: Path) -> None:
    """An interrupted step leaves the ranks apart; closing waits for nobody."""
    begin = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt), running(engine) as loaded:
        programs = loaded._loaded.loop.programs._calls._programs  # type: ignore[attr-defined]
        with failing(programs, "_run", KeyboardInterrupt()):
            with pytest.raises(KeyboardInterrupt):
                loaded.generate(PROMPT, GREEDY)
            with pytest.raises(RankError, match="a step was interrupted"):
                loaded.generate(PROMPT, GREEDY)
        begin = time.monotonic()
        raise KeyboardInterrupt
    assert time.monotonic() - begin < 20, "ranks wait for 30 s"
    assert not followers()


@pytest.fixture
def copy(undrafted: Path, tmp_path: Path) -> Path:
    return shutil.copytree(undrafted, tmp_path / "copy")


def test_a_folder_of_another_build(copy: Path) -> None:
    manifest = copy / "rank1" / MANIFEST
    sound = manifest.read_text()
    for field, value in (("fingerprint", "0" * 64), ("revision", "other")):
        raw = json.loads(sound)
        raw["build"][field] = value
        manifest.write_text(json.dumps(raw))
        code, _, err = invoke("run", "--engine", copy, "--prompt-ids", "5")
        assert code == 1
        assert err == f"error: {copy}/rank1: rank 1 of another build; rebuild the engine\n"
    shutil.rmtree(copy / "rank1")
    shutil.copytree(copy / "rank0", copy / "rank1")
    code, _, err = invoke("inspect", copy)
    assert (code, err) == (1, f"error: {copy}/rank1: rank 0 of another build; rebuild the engine\n")
    shutil.rmtree(copy / "rank1")
    code, out, _ = invoke("inspect", copy)
    assert code == 0
    assert re.search(r"ranks +2; here: 0 *\n", out)
    assert layout.find_missing_ranks(copy, read_manifest(copy).build.fingerprint, range(2)) == [1]


@pytest.mark.full
def test_damage_on_another_rank(copy: Path) -> None:
    """Each rank checks its own files; the line is the failing rank's."""
    (copy / "rank1" / "weights.safetensors").write_bytes(b"")
    code, out, err = invoke("run", "--engine", copy, "--prompt-ids", "5")
    assert (code, out) == (1, "")
    assert err.startswith(f"error: rank 1: {copy}/rank1/weights.safetensors: 0 bytes, the manif")
    assert err.count("\n") == 1
    (copy / "rank2").mkdir()
    (copy / "rank2" / "x").touch()
    assert "rank2/x is not part of the engine" in invoke("inspect", copy)[2]


def test_where_it_does_not_run(undrafted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match=r"of 2 ranks: use `mtpbuild run`, or .*per-node 2`$"):
        Engine.load(undrafted)
    manifest, cores = read_manifest(undrafted), measure_limits().processors
    many = 1 + 4 * cores
    crowded = manifest.model_copy(update={"build": manifest.build.model_copy(update={"tp": many})})
    says = rf"{many} ranks are too many for {cores} cores \(at most 4 each\): spread them over mach"
    with pytest.raises(UsageError, match=says):
        start_ranks(undrafted, crowded).__enter__()
    monkeypatch.setenv(ranks_module.TIMEOUT, "soon")
    with pytest.raises(UsageError, match="must be a number of seconds up to 86400, not 'soon'"):
        start_ranks(undrafted, read_manifest(undrafted)).__enter__()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(EngineError, match="needs 2 ranks, and torchrun started 4"):
        Engine.load(undrafted)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(EngineError, match=r"RANK and WORLD_SIZE in the environment: .*'first'"):
        Engine.load(undrafted)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(EngineError, match="this is rank 1: it follows rank 0"):
        Engine.load(undrafted)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="rank 0 follows nobody"):
        follow(undrafted)


def test_the_command_for_a_missing_rank_names_what_changes_weights() -> None:
    manifest = fake_manifest()
    flags = {"quantised_to": "int4", "head_weights": "int8", "revision": "v1"}
    changes = {
        "build": manifest.build.model_copy(update=flags),
        "capabilities": {"acceptance": ["strict", "mine"]},
    }
    command = build_command(Path("e"), manifest.model_copy(update=changes), 1)
    for flag in ("--weights int4", "--head-weights int8", "--revision v1", "--rank 1"):
        assert flag in command
    assert command.endswith("--out e --acceptance-rule mine")
