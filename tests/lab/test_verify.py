"""`mtpbuild verify`: a right engine passes every check, and each check fails a broken one."""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.lab.measure.compare import (
    LEAST_NOISE,
    TIE_FACTOR,
    Finding,
    NotChecked,
    compare_texts,
)
from mtpbuild.lab.measure.prompts import Prompt
from mtpbuild.lab.measure.runs import TimedAnswer
from mtpbuild.lab.verify import verify as module
from mtpbuild.lab.verify.checks import CHECKS, VerifyCase
from mtpbuild.lab.verify.distribution import EXPECTED, compute_chi_square_p_value, fit_prefixes
from mtpbuild.lab.verify.plain import judge_texts, load_plain, rounded_inputs
from mtpbuild.lab.verify.verify import run_check, summarise_checks
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import PROBE_VERSION, Manifest, read_manifest
from mtpbuild.runtime.cpu_library import ISAS
from mtpbuild.runtime.errors import BuildError
from mtpbuild.runtime.safetensors_header import read_header
from tests.reference.recompute import next_logits
from tests.support import toy
from tests.support.compiler import needs_compiler
from tests.support.engines import EngineBuilder, write_engine, write_manifest
from tests.support.fake_target import quick_target
from tests.support.fakes import FakePrograms, fake_manifest
from tests.support.invoke import invoke as command
from tests.support.invoke import refusal
from tests.support.registry import programs_by

GREEDY, PLAIN, SAMPLED, CHUNKS, BATCH, MACHINE, RELAXED, LAW, ACCEPTED, COST = CHECKS
TOY_CHECKS = [name for name in CHECKS if name not in (PLAIN, MACHINE, COST)]
PROMPTS = [[(7 * i + j) % toy.V for j in range(9)] for i in range(4)]


def case(kind: type[toy.Toy] = toy.Toy, nextn: int = 2, **build: int) -> VerifyCase:
    engine = toy.toy_engine(kind, nextn, **build)
    return VerifyCase(
        engine,
        base=toy.toy_engine(toy.Toy, 0),
        reload=lambda chunk=64, threads=None: toy.toy_engine(kind, nextn, prefill_chunk=chunk),
        prompts=PROMPTS,
        length=40,
        seeds=250,
        checkpoint=None,
    )


# Each check


def test_a_right_engine_passes() -> None:
    right = case(max_batch=3)
    assert {name: run_check(name, right).verdict for name in TOY_CHECKS} == dict.fromkeys(
        TOY_CHECKS, "passed"
    )


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        (toy.WrongOnce, GREEDY, "text 0, token 11: says "),
        (toy.OtherWeights, GREEDY, "log-probabilities of the same tokens are up to .* apart"),
        (toy.WrongOnce, SAMPLED, "text 0, token 11: says "),
        (toy.OtherSeeds, SAMPLED, "text 0, token "),
        (toy.Chunky, CHUNKS, "text 0, token 0: says "),
        (toy.Crowded, BATCH, "up to .* apart: other weights, or a wrong cache"),
        (toy.Loose, RELAXED, "text ., token "),
        (toy.ReusesANumber, LAW, "text . begins with "),
        (toy.Biased, LAW, "text . begins with "),
        (toy.Damaged, ACCEPTED, "the MTP modules are damaged"),
    ],
)
def test_a_broken_engine_fails(kind: type[toy.Toy], name: str, says: str) -> None:
    found = run_check(name, case(kind, max_batch=3))
    assert found.verdict == "failed"
    assert re.search(says, found.detail), found.detail


def test_damaged_modules_leave_the_text_right() -> None:
    damaged = case(toy.Damaged)
    assert run_check(GREEDY, damaged).verdict == "passed"
    assert run_check(SAMPLED, damaged).verdict == "passed"
    assert run_check(ACCEPTED, damaged).figures["draft_acceptance_rate"] == 0


def test_what_can_not_be_checked() -> None:
    alone = case(nextn=0)
    reasons = {name: run_check(name, alone) for name in (BATCH, ACCEPTED, PLAIN)}
    assert {found.verdict for found in reasons.values()} == {"not checked"}
    assert "--max-batch 1" in reasons[BATCH].detail
    assert reasons[ACCEPTED].detail == "the engine drafts nothing"
    assert reasons[PLAIN].detail == "no recipe is called fake: give --model"


def test_a_recipe_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the plain model nor a baseline: the line says how to get them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    without = replace(case(), checkpoint="deepseek-r1")
    found = run_check(PLAIN, without)
    assert found.verdict == "not checked"
    assert "deepseek-r1 is not downloaded here: `mtpbuild build" in found.detail
    request = module.VerifyRequest(Path("e"), model="deepseek-r1")
    assert no_baseline(request, without.engine.manifest) == found.detail


def no_baseline(request: module.VerifyRequest, manifest: Manifest) -> str:
    """Why there is no engine to compare with."""
    with pytest.raises(NotChecked) as reason:
        module.find_baseline(request, manifest, print)
    return str(reason.value)


def case_of(dtype: str, kind: type[toy.Toy], weights: str = "float32") -> VerifyCase:
    """Return a case of an engine that computes in `dtype`, with weights in a format."""
    made = case(kind)
    block = 32 if weights in ("int4", "int8") else None
    changes = {"dtype": dtype, "weights": weights, "block_size": block}
    build = made.engine.manifest.build.model_copy(update=changes)
    made.engine._loaded.manifest = made.engine.manifest.model_copy(update={"build": build})
    return made


@pytest.mark.parametrize(
    ("dtype", "weights", "verdict"),
    [
        ("float32", "float32", "failed"),
        ("float32", "fp8", "failed"),
        ("float32", "int4", "passed"),
        ("float32", "int8", "passed"),
        ("bfloat16", "bfloat16", "passed"),
    ],
)
def test_rounding_of_bfloat16_and_integers(dtype: str, weights: str, verdict: str) -> None:
    """Near-ties are many there; a wrong token is found all the same."""
    found = run_check(GREEDY, case_of(dtype, toy.Rounded, weights))
    assert found.verdict == verdict, found.detail
    wrong = run_check(GREEDY, case_of(dtype, toy.WrongOnce, weights))
    assert (wrong.verdict, wrong.detail[:17]) == ("failed", "text 0, token 11:")


def exact_case(kind: type[toy.Toy] = toy.Toy) -> VerifyCase:
    """Return a case of two engines that say that they are exact."""
    made = case(kind, max_batch=3)
    for engine in (made.engine, made.base):
        assert isinstance(engine, Engine)
        build = engine.manifest.build.model_copy(
            update={"exact": True, "probe_version": PROBE_VERSION}
        )
        engine._loaded.manifest = engine.manifest.model_copy(update={"build": build})
    return made


def test_an_exact_engine_passes() -> None:
    right = exact_case()
    found = {name: run_check(name, right) for name in (*TOY_CHECKS, MACHINE)}
    assert {each.verdict for each in found.values()} == {"passed"}
    assert found[GREEDY].detail == "4 texts equal to the bit, 160 tokens"
    ways = ", ".join((*ISAS, "1 thread", "2 threads"))
    output = f"4 texts equal to the bit, 64 tokens each: {ways}"
    assert found[MACHINE].detail == output


def test_an_exact_engine_may_not_round() -> None:
    """What passes for a near-tie elsewhere fails here, in texts and in log-probabilities."""
    found = run_check(GREEDY, exact_case(toy.Rounded))
    assert (found.verdict, found.detail[:17]) == ("failed", "text 0, token 0: ")
    elsewhere = replace(exact_case(), reload=lambda **_: toy.toy_engine(toy.Rounded, 2))
    found = run_check(MACHINE, elsewhere)
    assert (found.verdict, found.detail[:24]) == ("failed", "plain: text 0, token 0: ")
    assert run_check(MACHINE, case()).detail == "the engine is not exact"


@needs_compiler
@pytest.mark.usefixtures("quick_inductor")
def test_a_baseline_is_of_the_engines_target(
    smallest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes in the engine's dtype too; where it can't be built, the reason is the answer."""
    monkeypatch.chdir(tmp_path)
    request = module.VerifyRequest(Path("e"), model=str(smallest))

    def manifest_in(dtype: str) -> Manifest:
        manifest = case_of(dtype, toy.Toy).engine.manifest
        target = manifest.target.model_copy(update={"name": "inductor"})
        return manifest.model_copy(update={"target": target})

    found = read_manifest(module.find_baseline(request, manifest_in("bfloat16"), print))
    assert (found.target.name, found.build.nextn) == ("inductor", 0)
    assert found.build.dtype == "bfloat16"

    def no_compiler(plan: Plan) -> None:
        raise BuildError("no compiler is here")

    with quick_target("inductor", check_machine=no_compiler):
        output = no_baseline(request, manifest_in("float32"))
    assert output == "there is no nextn 0 engine, and no compiler is here: give --against"


# The arithmetic


def played(
    tokens: list[int], margins: list[float], logprob: float | Sequence[float] = -1.0
) -> TimedAnswer:
    logprobs = [logprob] * len(tokens) if isinstance(logprob, float) else [*logprob]
    prompt = Prompt("", 0, [], SamplingParams())
    return TimedAnswer(prompt, token_ids=tokens, logprobs=logprobs, margins=margins)


def test_near_ties() -> None:
    """A near-tie parts two texts; after it every token is compared again."""
    theirs = played([1, 2, 3, 4], [9.0, 1e-6, 9.0, 9.0], -1.0)
    ours = played([1, 5, 6, 7], [9.0, 1e-6, 9.0, 9.0], -1.0)
    seen = []

    def replay(number: int, known: list[int], count: int) -> TimedAnswer:
        seen.append((number, known, count))
        return played([3, 4], [9.0, 9.0])

    found = compare_texts([ours], [theirs], replay)
    assert (found.passed, found.figures["near_ties"]) == (True, 1)
    assert seen == [(0, [1, 2], 2)]
    wrong = compare_texts([ours], [theirs], lambda *_: played([3, 8], [9.0, 9.0]))
    assert not wrong.passed
    assert wrong.detail.startswith("text 0, token 3: says 8, not 4 (margin 9, a near-tie is below")
    both = [ours] * 2, [theirs] * 2
    assert not compare_texts(*both, replay).passed  # two of two are too many


def test_what_is_near_is_measured() -> None:
    """4 times the difference of the log-probabilities of the same tokens."""
    theirs, margin = played([1, 2], [9.0, 5e-4], -1.0), 5e-4
    for noise, passes in ((1e-4, False), (2e-4, True)):
        ours = played([1, 3], [9.0, margin], [-1.0 - noise, -1.0])
        found = compare_texts([ours], [theirs], lambda *_: pytest.fail("nothing is left to say"))
        assert found.passed == passes
    assert margin > TIE_FACTOR * LEAST_NOISE


def test_one_log_probability_in_a_hundred_may_jump() -> None:
    """A near-tie of two experts changes one token; a wrong cache changes all that follow."""
    count = 300
    theirs = played([1] * count, [9.0] * count, -1.0)
    for jumps, passes in ((0, True), (3, True), (4, False), (count, False)):
        logprobs = [-1.07] * jumps + [-1.0] * (count - jumps)
        ours = played([1] * count, [9.0] * count, logprobs)
        found = compare_texts([ours], [theirs], lambda *_: pytest.fail("they don't part"))
        assert found.passed == passes


def test_a_shorter_text_is_another_text() -> None:
    short, long = played([1, 2], [0.0] * 2), played([1, 2, 3], [0.0] * 3)
    assert "says 3, not an end" in compare_texts([long], [short], lambda *_: long).detail
    assert "ends, not 3" in compare_texts([short], [long], lambda *_: short).detail


def test_chi_square() -> None:
    """Table values of the 5 % and the 0.1 % point."""
    for freedom, five, thousandth in ((1, 3.841, 10.828), (2, 5.991, 13.816), (9, 16.919, 27.877)):
        assert compute_chi_square_p_value(five, freedom) == pytest.approx(0.05, rel=1e-3)
        assert compute_chi_square_p_value(thousandth, freedom) == pytest.approx(0.001, rel=1e-3)
    assert compute_chi_square_p_value(0, 3) == 1


def test_prefixes_partition_all_texts() -> None:
    """Known: a (0.6), a then b (0.5 of it), c (0.02, too rare). 100 texts."""
    known = {(1,): 0.6, (1, 2): 0.3, (3,): 0.02}
    texts = [(1, 2)] * 30 + [(1, 7)] * 30 + [(3, 1)] * 2 + [(8, 8)] * 38
    found = fit_prefixes(texts, known)
    assert found.statistic == pytest.approx(0)
    assert found.freedom == 2
    skewed = fit_prefixes([(1, 2)] * 60 + [(8, 8)] * 40, known)
    assert skewed.statistic == pytest.approx(30 + 30)
    assert skewed.worst == ((1, 2), 60, 30)
    assert EXPECTED == 5


# Against the plain model, and whole


def test_the_plain_model_judges(predictable_folder: Path, predictable: PlainDeepseek) -> None:
    model = load_plain(predictable_folder)
    prompts = [[9, 10, 11]]
    known = next_logits(predictable, prompts[0])
    best, second = known.topk(2).indices.tolist()
    logprobs = known.log_softmax(-1)

    def answer_with(token: int, off: float = 0.0) -> list[TimedAnswer]:
        return [played([token], [1.0], float(logprobs[token]) + off)]

    assert judge_texts(model, prompts, answer_with(best)).passed
    found = judge_texts(model, prompts, answer_with(second))
    assert not found.passed
    assert f"text 0, token 0: says {second}, the model {best}" in found.detail
    assert "off: other weights" in judge_texts(model, prompts, answer_with(best, 0.1)).detail


def test_the_plain_model_rounds_what_int8_kernels_multiply() -> None:
    """Blocks whose largest numbers are 254 and 127 have numbers that are 2 and 1 apart."""
    product = torch.nn.Linear(64, 2, bias=False)
    product.weight.data = torch.ones(2, 64)
    x = torch.zeros(1, 64)
    x[0, :2], x[0, 32:34] = torch.tensor([254.0, 3.1]), torch.tensor([127.0, -3.4])
    with rounded_inputs(32):
        assert product(x).tolist() == [[254 + 4 + 127 - 3] * 2]
    with rounded_inputs(None):
        assert product(x)[0].tolist() == pytest.approx([254 + 3.1 + 127 - 3.4] * 2)
    assert product(x)[0].tolist() == pytest.approx([254 + 3.1 + 127 - 3.4] * 2)


invoke = partial(command, "verify")


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    lines = [{"input_ids": rng.integers(9, 61, n).tolist()} for n in (9, 12, 7)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.xdist_group("predictable")
def test_real_engines(
    predictable_folder: Path,
    predictable_engine: EngineBuilder,
    prompts_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every check on a built engine; then with its modules' weights damaged."""
    base, engine = predictable_engine(0), predictable_engine(3, max_batch=3)
    flags = ("--model", predictable_folder, "--prompts", prompts_file)
    few = (*flags, "--output-len", 32, "--seeds", 20, "--threads", 1, "--against", base)
    code, out, err = invoke("--engine", engine, *few)
    assert (code, err) == (0, ""), out
    assert out.splitlines()[-1] == f"passed: {len(CHECKS) - 1} checks, 1 not checked"  # rounding

    copy = tmp_path / "damaged_n3"
    shutil.copytree(engine, copy)
    damage_modules(copy)
    telling = {name: CHECKS[name] for name in (GREEDY, SAMPLED, ACCEPTED)}
    monkeypatch.setattr(module, "CHECKS", telling)
    code, out, err = invoke("--engine", copy, *few, "--json")
    verdicts = {c["check"]: c["verdict"] for c in json.loads(out)["checks"]}
    assert (code, err) == (1, ""), out
    assert verdicts == {GREEDY: "passed", SAMPLED: "passed", ACCEPTED: "failed"}


def damage_modules(engine: Path) -> None:
    """Turn the sign of what heads read of the MTP modules: what was likeliest is drafted last."""
    path = engine / "weights.safetensors"
    data = bytearray(path.read_bytes())
    header, _, start = read_header(path)
    for name, tensor in header.items():
        if name.startswith("mtp.") and name.endswith("shared_head.norm.weight"):
            first, last = (start + offset for offset in tensor["data_offsets"])
            data[first:last] = (-np.frombuffer(data[first:last], "<f4")).tobytes()
    path.unlink()  # a hard link of another engine's file
    path.write_bytes(data)
    write_manifest(engine, read_manifest(engine))


# The command


def test_the_last_line() -> None:
    manifest = toy.toy_engine(toy.Toy).manifest

    def line(*verdicts: str) -> str:
        passed = {"passed": True, "failed": False, "not checked": None}
        checks = {f"check {i}": Finding(passed[v], "") for i, v in enumerate(verdicts)}
        assert [found.verdict for found in checks.values()] == list(verdicts)
        return summarise_checks(module.Verification(Path("e"), manifest, None, checks))

    assert line("passed", "not checked", "passed") == "passed: 2 checks, 1 not checked"
    assert line("passed", "failed", "failed") == "FAILED: check 1; check 2"


@pytest.mark.usefixtures("quick")
def test_a_baseline_is_built(
    smallest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is built as bench builds its engines; without a recipe there is none."""
    monkeypatch.chdir(tmp_path)

    def built(request: module.VerifyRequest, manifest: Manifest) -> Manifest:
        folder = module.find_baseline(request, manifest, print)
        assert isinstance(folder, Path)
        assert folder.parent == Path("engines/.bench")
        return read_manifest(folder)

    manifest = toy.toy_engine(toy.Toy).manifest
    request = module.VerifyRequest(Path("e"))
    output = no_baseline(request, manifest)
    assert output == "no recipe is called fake: give --against or --model"
    found = built(module.VerifyRequest(Path("e"), model=str(smallest)), manifest)
    assert (found.model.name, found.build.nextn, found.build.layers) == ("small", 0, None)
    model = manifest.model.model_copy(update={"name": "deepseek-tiny-layers1-2"})
    build = manifest.build.model_copy(update={"layers": "1-2"})
    some = manifest.model_copy(update={"model": model, "build": build})
    found = built(module.VerifyRequest(Path("e")), some)
    assert (found.whole_model, found.build.nextn, found.build.layers) == ("deepseek-tiny", 0, "1-2")


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        ("--engine nowhere", 1, "no such engine directory"),
        ("--engine fake_n3 --output-len 1", 2, "--output-len 1 is outside 2.."),
        ("--engine fake_n3 --seeds 1", 2, "--seeds 1 is outside 20.."),
        ("--engine fake_n3 --exact", 2, "--exact: fake_n3 is not exact by its engine.json"),
        ("--engine fake_n3 --model nowhere", 2, "'nowhere' is neither a recipe nor a checkpoint"),
        ("--engine fake_n3 --prompts none.jsonl", 2, "--prompts none.jsonl: can't be read"),
        ("--engine fake_n3 --prompts p.jsonl --output-len 63", 2, "the engine holds (64): see --"),
        ("--engine fake_n3 --against nowhere --prompts p.jsonl --output-len 9", 1, "no such eng"),
    ],
)
def test_errors_are_one_line(
    flags: str, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_engine(tmp_path / "fake_n3", fake_manifest())
    Path("p.jsonl").write_text('{"input_ids": [5, 6]}\n')
    with programs_by(FakePrograms):
        assert says in refusal("verify", *flags.split(), code=code)
