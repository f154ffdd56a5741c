"""Rules and drafters of other packages in `bench`, `eval` and `verify`, and where they are missing.

Programs are fakes, so that everything around them is what is tested.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.cli.make import make_engine
from mtpbuild.lab.eval.evaluate import EvalRequest, choose_settings
from mtpbuild.lab.verify.checks import VerifyCase
from mtpbuild.lab.verify.verify import run_check
from mtpbuild.runtime import Engine, Manifest, SamplingParams
from mtpbuild.runtime.contract.controls import GREEDY, StepControls
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.contract.rules import BUILT_IN, list_rules_of
from mtpbuild.runtime.errors import UsageError
from tests.support import installed, thrifty
from tests.support.bench_samples import small_tokens, write_lines
from tests.support.engines import write_engine
from tests.support.fakes import FakePrograms, fake_manifest, fake_tokenizer
from tests.support.invoke import invoke, refusal
from tests.support.live_server import live
from tests.support.registry import programs_by
from tests.support.toy import Biased, Toy, V, toy_engine

MISSING = "acceptance 'elsewhere': the engine has this rule of far 2.0, which is not installed here"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder for results, in which the rule and the drafter are installed."""
    monkeypatch.chdir(tmp_path)
    rule, drafter = tmp_path / "rule", tmp_path / "drafter"
    rule.mkdir()
    drafter.mkdir()
    at = "tests.support.thrifty:THRIFTY", "tests.support.lookup:LOOKUP"
    with (
        installed.installed(rule, "mtpbuild.acceptance_rules", "thrifty", at[0]),
        installed.installed(drafter, "mtpbuild.drafters", "lookup", at[1]),
        programs_by(partial(FakePrograms, next_token=small_tokens)),
    ):
        yield tmp_path


def with_rule(name: str, manifest: Manifest) -> Manifest:
    """Return the manifest of an engine that was built with a rule of another package."""
    build = manifest.build.model_copy(update={"packages": {"elsewhere": "far 2.0"}})
    rules = {"acceptance": [*BUILT_IN, name]}
    return manifest.model_copy(update={"capabilities": rules, "build": build})


@pytest.mark.usefixtures("quick")
def test_bench_builds_engines_with_the_rule(smallest: Path, here: Path) -> None:
    lines = write_lines(here / "ids.jsonl", {"input_ids": [5, 6, 7], "output_tokens": 12})
    asked = ("--model", smallest, "--nextn", 1, "--dataset", lines, "--temperature", 0.8)
    code, out, _ = invoke("bench", *asked, "--acceptance", "thrifty")
    assert code == 0
    assert "thrifty: a rule of another package; nextn 0 is strict, and its text may differ" in out
    document = json.loads(Path("bench_results/bench.json").read_text())
    folders = [Path(result["engine"]) for result in document["results"]]
    assert [f.name for f in folders] == [f"small_n{n}_default_b1_thrifty" for n in (0, 1)]
    for folder in folders:
        manifest = read_manifest(folder)
        assert manifest.capabilities["acceptance"] == [*BUILT_IN, "thrifty"]
        assert manifest.build.packages == {"thrifty": "thrifty 1.0"}
    assert not document["same_output_expected"]


@pytest.mark.usefixtures("quick")
def test_bench_measures_a_drafter(smallest: Path, here: Path) -> None:
    lines = write_lines(here / "ids.jsonl", {"input_ids": [5, 6, 7], "output_tokens": 12})
    asked = ("--model", smallest, "--nextn", 2, "--dataset", lines, "--drafter", "lookup")
    code, out, err = invoke("bench", *asked, "--json")
    assert (code, err) == (0, "")
    _, drafting = json.loads(out)["results"]
    assert drafting["drafter"] == "lookup"
    build = read_manifest(Path(drafting["engine"])).build
    assert build.packages == {"lookup": "lookup 1.0"}


@pytest.mark.usefixtures("quick")
def test_a_model_that_is_run_has_an_engine_with_the_rule() -> None:
    """One that is here without it is left alone; a rule that nobody knows is refused first."""
    with pytest.raises(UsageError, match="unknown acceptance rule 'colour'; supported: thrifty"):
        make_engine("deepseek-tiny", True, ("colour",))
    plain, own = (make_engine("deepseek-tiny", True, rules) for rules in ((), ("thrifty",)))
    assert plain != own
    assert list_rules_of(read_manifest(plain)) == []
    assert list_rules_of(read_manifest(own)) == ["thrifty"]
    assert make_engine("deepseek-tiny", False, ("thrifty",)) == own


def test_eval_compares_it_with_strict(here: Path) -> None:
    lines = ({"prompt": "a" * (i + 1), "answer": "7", "output_tokens": 5} for i in range(3))
    write_lines(here / "task.jsonl", *lines)
    write_engine(here / "engine", with_rule("thrifty", fake_manifest()))
    asked = ("--engine", "engine", "--task", "task.jsonl", "--acceptance", "thrifty", "--json")
    code, out, err = invoke("eval", *asked)
    assert (code, err) == (0, "")
    assert [r["setting"] for r in json.loads(out)["results"]] == ["strict", "thrifty"]
    own = SamplingParams(5, acceptance="thrifty", acceptance_settings={"thrifty_share": 0.25})
    strict, rule = (
        replace(own, **changes)
        for changes in choose_settings(EvalRequest(engine=here, params=own)).values()
    )
    assert (strict.acceptance, strict.acceptance_settings) == ("strict", None)
    assert (rule.acceptance, rule.acceptance_settings) == ("thrifty", {"thrifty_share": 0.25})


@pytest.mark.parametrize(
    ("command", "flags"),
    [("run", "--prompt-ids 5"), ("eval", "--task task.jsonl"), ("eval", "--temperature 1")],
)
def test_what_lacks_it_is_told_at_once(command: str, flags: str, here: Path) -> None:
    """An engine without the rule, and an installation without the package of an engine's rule."""
    write_lines(here / "task.jsonl", {"prompt": "a", "answer": "7"})
    write_engine(here / "plain", fake_manifest().model_copy(update=PLAIN))
    write_engine(here / "other", with_rule("elsewhere", fake_manifest()))
    given = flags.split()
    assert refusal(command, "--engine", "plain", *given, "--acceptance", "thrifty") == (
        "acceptance 'thrifty' is not in this engine, which has strict, rejection, block, relaxed, "
        "synthetic: build it with `--acceptance-rule` thrifty"
    )
    assert refusal(command, "--engine", "other", *given, "--acceptance", "elsewhere") == MISSING
    assert not Path("eval_results/eval.json").exists()


PLAIN: dict[str, Any] = {"capabilities": {"acceptance": [*BUILT_IN]}}


def test_a_line_and_a_body_that_ask_for_it(here: Path) -> None:
    manifest = with_rule("elsewhere", fake_manifest())
    write_engine(here / "other", manifest)
    lines = write_lines(here / "in.jsonl", {"input_ids": [5], "acceptance": "elsewhere"})
    told = refusal("run", "--engine", "other", "--input", lines)
    assert told == f"{lines}:1: {MISSING}"
    engine = Engine(FakePrograms(manifest), manifest, fake_tokenizer())
    with engine, live(engine) as server, server.client() as client:
        body = {"prompt": [5], "acceptance": "elsewhere"}
        error = client.post("/v1/completions", json=body).json()["error"]
    assert (error["param"], error["message"]) == ("acceptance", MISSING)


def test_eval_with_two_kinds_of_acceptance(here: Path) -> None:
    write_engine(here / "engine", with_rule("thrifty", fake_manifest()))
    asked = ("--engine", "engine", "--acceptance", "thrifty", "--relaxed-topk", "5")
    assert refusal("eval", *asked) == "--acceptance thrifty is compared with strict alone"


class Rejecting(Toy):
    """Judges by rejection where a request asks for the rule, whose law is then the model's."""

    def begin(self, slot: int, length: int, newest: int, controls: StepControls = GREEDY) -> None:
        super().begin(slot, length, newest, replace(controls, rejection="thrifty" in controls.rule))


class Wrong(Biased, Rejecting):
    """The same with a rejected draft's mass twice."""


def law_of(kind: type[Toy], rule: str = "thrifty") -> Any:
    engine = toy_engine(kind)
    engine._loaded.manifest = with_rule(rule, engine.manifest)
    prompts = [[(7 * i + j) % V for j in range(9)] for i in range(4)]
    case = VerifyCase(engine, lambda **own: engine, prompts, 40, toy_engine(Toy, 0), 250)
    return run_check(f"{rule} has the model's distribution", case)


def test_verify_checks_the_law_that_a_rule_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    assert law_of(Rejecting).passed
    wrong = law_of(Wrong)
    assert wrong.passed is False
    assert "begins with" in wrong.detail
    assert law_of(Toy, "elsewhere").detail == MISSING.partition(": ")[2]
    monkeypatch.setattr(thrifty, "THRIFTY", replace(thrifty.THRIFTY, lossless=False))
    lossy = law_of(Rejecting)
    assert (lossy.passed, lossy.detail) == (None, "the rule does not claim it")
