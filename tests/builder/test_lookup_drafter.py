"""A drafter that this package does not know: found by its entry point, built, run, refused.

The oracle is the engine of nextn 0: drafts change how fast a text comes, not the text.
"""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpbuild.builder.compiler.fingerprint import fingerprint, hash_files
from mtpbuild.builder.models import load_config
from mtpbuild.builder.plan.plan import Plan, choose_drafter, make_state_specs
from mtpbuild.builder.targets import load_target
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.contract.state import StateSpec
from mtpbuild.runtime.errors import BuildError, UsageError
from tests.support import installed, lookup
from tests.support.engines import EngineBuilder
from tests.support.requests import build, build_request

pytestmark = pytest.mark.xdist_group("predictable")  # another worker would wait for the engines
PROMPTS = [[9, 20, 21, 33], [5], [7, 8, 7, 8, 7, 8, 7]]
NEXTN = 3


@pytest.fixture(scope="module", autouse=True)
def site_packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the drafter."""
    at, folder = "tests.support.lookup:LOOKUP", tmp_path_factory.mktemp("site-packages")
    with installed.installed(folder, "mtpbuild.drafters", "lookup", at):
        yield folder


@pytest.fixture
def drafting(predictable_engine: EngineBuilder) -> Path:
    return predictable_engine(NEXTN, "lookup", max_batch=2)


@pytest.mark.full
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "seed": 4},
        {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.3},
    ],
)
def test_texts_are_those_without_drafts(
    sampling: dict[str, Any], drafting: Path, predictable_engine: EngineBuilder
) -> None:
    """Its slots of one batch have prompts of one token and of several chunks."""
    params = SamplingParams(max_tokens=30, ignore_eos=True, **sampling)
    texts, accepted = [], 0
    for folder in (predictable_engine(0), drafting):
        with Engine.load(folder, threads=1) as engine:
            results = engine.generate(PROMPTS, params)
            counts = [r.metrics.speculative_decoding for r in results]
        texts.append([result.token_ids for result in results])
        accepted = sum(count.num_accepted_draft_tokens for count in counts)
    assert texts[0] == texts[1]
    assert accepted


@pytest.mark.full
def test_the_manifest_names_its_state(drafting: Path) -> None:
    manifest = read_manifest(drafting)
    assert (manifest.build.drafter, manifest.lookahead) == ("lookup", 1)
    assert [s.name for s in manifest.state if s.role == "carry"][-2:] == ["draft_probs", "seen"]
    assert not [s for s in manifest.state if s.owner.startswith("mtp")]


@pytest.mark.full
def test_the_command_line(smallest: Path, site_packages: Path, tmp_path: Path) -> None:
    """It is built where its package is installed, and runs where it is not."""
    flags = ("--nextn", "2", "--drafter", "lookup", "--out", tmp_path / "engine")
    asked = ("build", "--model", smallest, *flags)
    refused = installed.mtpbuild(*asked)
    assert refused.returncode == 2
    says = "--drafter lookup is unknown; supported: mtp-eagle, mtp-vanilla"
    assert refused.stderr.strip().endswith(says)
    done = installed.mtpbuild(*asked, path=(site_packages,))
    assert done.returncode == 0, done.stderr
    prompt = ("--prompt-ids", "3,1,4", "--max-tokens", "5")
    ran = installed.mtpbuild("run", "--engine", tmp_path / "engine", *prompt)
    assert ran.returncode == 0, ran.stderr


def test_the_record_needs_no_torch() -> None:
    code = "import sys, tests.support.lookup as t; t.LOOKUP.sources; print('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=installed.ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def spec(name: str = "seen", dtype: Any = "int64", **sizes: int) -> StateSpec:
    given = {"batch": 1, "seen": lookup.SEEN} | sizes
    return StateSpec(name=name, role="carry", dtype=dtype, sizes=given)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"states": ()}, "its program finds no state seen to read"),
        ({"states": (spec(seen=30),)}, "state seen of a slot is int64 [24], declared int64 [30]"),
        (
            {"states": (spec(dtype="bool"),)},
            "state seen of a slot is int64 [24], declared bool [24]",
        ),
        ({"states": (spec(), spec("more"))}, "its program leaves out state more"),
        (
            {"states": (spec(batch=2),)},
            "state seen must be a carry whose first size is batch, here 1",
        ),
        ({"states": (spec("window"),)}, "another input is called window"),
        ({"states": (spec("top_k"),)}, "another input is called top_k"),
        ({"lookahead": 0}, "with modules or states it needs a lookahead of 1"),
        ({"modules": 1}, "its program leaves out state mtp_kv.0"),
    ],
)
def test_a_mistake_in_what_it_declares_is_refused(
    wrong: dict[str, Any],
    says: str,
    smallest: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own: dict[str, Any] = {name: lambda given, value=value: value for name, value in wrong.items()}
    monkeypatch.setattr(lookup, "LOOKUP", replace(lookup.LOOKUP, **own))
    with pytest.raises(BuildError) as caught:
        build(build_request(smallest, (1,), drafter="lookup", out=tmp_path / "engine"))
    assert str(caught.value) == f"drafter lookup: {says}"


@pytest.mark.full
def test_a_mistake_of_its_program_is_refused(
    smallest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = lookup.Lookup.__call__
    monkeypatch.setattr(
        lookup.Lookup,
        "__call__",
        lambda self, *given: (own(self, *given)[0], own(self, *given)[1] | {"more": torch.ones(1)}),
    )
    with pytest.raises(BuildError) as caught:
        build(build_request(smallest, (1,), drafter="lookup", out=tmp_path / "engine"))
    assert str(caught.value) == "drafter lookup: its program does not declare state more"


def test_what_it_is_asked_for(smallest: Path) -> None:
    """It needs no modules; it can't draft a number that changes from step to step."""
    config = load_config(smallest)
    without = replace(config, num_nextn_predict_layers=0)
    assert choose_drafter(without, 3, "lookup") == "lookup"
    with pytest.raises(UsageError, match=r"^--nextn auto drafts by mtp-eagle: each step of look"):
        choose_drafter(config, "auto", "lookup")
    with pytest.raises(UsageError, match=r"^unknown drafter 'look'; supported: mtp-eagle, mtp-van"):
        choose_drafter(config, 3, "look")


def test_its_source_is_in_the_fingerprint(
    smallest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change in its file is another engine; a comment is not, nor is a change for Eagle's."""
    config, target = load_config(smallest), load_target("onnxruntime")
    (tmp_path / "looker.py").write_text(text := Path(lookup.__file__).read_text(encoding="utf-8"))
    monkeypatch.syspath_prepend(tmp_path)
    __import__("looker")
    monkeypatch.setattr(
        lookup, "LOOKUP", replace(lookup.LOOKUP, program="looker:Lookup", states=lookup.states)
    )

    def found(drafter: str) -> str:
        plan = Plan(config, 1, drafter, 1, 64, 8)
        assert make_state_specs(plan)
        return fingerprint(hash_files(smallest), plan, target)

    before = [found("lookup"), found("mtp-eagle")]
    (tmp_path / "looker.py").write_text(f"{text}\n# a comment\n")
    assert [found("lookup"), found("mtp-eagle")] == before
    (tmp_path / "looker.py").write_text(text.replace("clamp(max=SEEN - 1)", "clamp(max=SEEN - 2)"))
    assert found("lookup") != before[0]
    assert found("mtp-eagle") == before[1]
