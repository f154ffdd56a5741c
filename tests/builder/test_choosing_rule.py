"""A built engine with a rule that chooses the token after a rejection.

The oracle is NumPy: every step is judged anew, by the plain model's logits and its drafter's.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.runtime import Engine, SamplingParams, Trace
from mtpbuild.runtime.contract.controls import StepControls
from mtpbuild.runtime.contract.drafters import VANILLA
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.trace.lines import StepLine, read_trace
from tests.reference.recompute import draft_logits, row_logits
from tests.reference.sampling import distribution
from tests.support import installed, thrifty
from tests.support.engines import EngineBuilder
from tests.support.requests import build, build_request

pytestmark = pytest.mark.xdist_group("predictable")  # another worker would wait for the engines
PROMPT, NEXTN, SHARE = [9, 20, 21, 33], 3, 0.6
SHAPE = StepControls(temperature=1.3, top_p=0.9)
RULE: dict[str, Any] = {"acceptance": "thrifty", "acceptance_settings": {"thrifty_share": SHARE}}
HOT = SamplingParams(60, ignore_eos=True, temperature=1.3, top_p=0.9, seed=5)


@pytest.fixture(scope="module", autouse=True)
def rule(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install the rule, beside one that only accepts."""
    with installed.rules_installed(tmp_path_factory.mktemp("site-packages")):
        yield


@pytest.fixture(scope="module")
def engine(with_rules: Callable[[], Path], rule: None) -> Path:
    return with_rules()


@pytest.mark.parametrize("drafts", ["probabilistic", "greedy"])
def test_every_step_is_what_the_rule_says(
    drafts: str, engine: Path, predictable: PlainDeepseek, tmp_path: Path
) -> None:
    """A draft that the drafter chose has probability 1 there, in place of its share."""
    with Engine.load(engine, threads=1) as loaded, Trace(loaded, tmp_path / "t.jsonl") as trace:
        params = replace(HOT, **RULE | {"draft_sample_method": drafts})
        loaded.stream(PROMPT, params, observer=trace.request()).result()
    (traced,) = read_trace(tmp_path / "t.jsonl").requests.values()
    known, chosen = list(PROMPT), 0
    for step in traced.steps:
        wanted = judge(step, known, predictable, drawn=drafts == "probabilistic")
        assert step.tokens == wanted
        chosen += len(wanted) <= step.num_drafts
        known += step.tokens
    assert chosen > 5


def judge(step: StepLine, known: list[int], model: PlainDeepseek, drawn: bool) -> list[int]:
    """Return the tokens that the rule emits."""
    drafts, numbers = step.window[1:], step.uniforms
    assert numbers is not None
    rows = row_logits(model, [*known, *drafts])[len(known) - 1 :].double().numpy()
    p = [distribution(row, SHAPE) for row in rows]
    own = draft_logits(model, known, len(drafts), VANILLA, drafts) if drafts else []
    for j, draft in enumerate(drafts):
        q = distribution(own[j].double().numpy(), SHAPE) if drawn else np.eye(len(p[j]))[draft]
        kept = np.minimum(q, SHARE * p[j])
        if numbers.accept[j] * q[draft] >= kept[draft]:
            return [*drafts[:j], draw(p[j] - kept, numbers.recover[j])]
    return [*drafts, draw(p[-1], numbers.draft[-1])]


def draw(weights: np.ndarray[tuple[int], np.dtype[np.float64]], number: float) -> int:
    return int((np.cumsum(weights) <= np.float32(number) * weights.sum()).sum())


def test_other_requests_are_what_they_were(engine: Path, predictable_engine: EngineBuilder) -> None:
    """To the bit of every log-probability, beside a request that asks for the rule."""
    rejection = replace(HOT, acceptance="rejection")
    block = replace(rejection, rejection_sample_method="block")
    greedy = SamplingParams(60, ignore_eos=True)
    asked = [replace(own, logprobs=2) for own in (HOT, rejection, block, greedy)]
    with Engine.load(predictable_engine(NEXTN), threads=1) as without:
        before = [without.generate(PROMPT, params) for params in asked]
    with Engine.load(engine, threads=1) as loaded:
        for params, result in zip(asked, before, strict=True):
            _, now = loaded.generate([PROMPT, PROMPT], [replace(HOT, **RULE), params])
            assert (now.token_ids, now.logprobs) == (result.token_ids, result.logprobs)


def test_kernels_can_not_choose(smallest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernel = replace(thrifty.THRIFTY, kernel=thrifty.keeps)
    monkeypatch.setattr(thrifty, "THRIFTY", with_kernel)
    with pytest.raises(UsageError) as caught:
        build(build_request(smallest, (1,), acceptance_rules=("thrifty",), target="tensorrt"))
    says = "--acceptance-rule thrifty: it chooses tokens, which target tensorrt can't yet"
    assert str(caught.value) == says
