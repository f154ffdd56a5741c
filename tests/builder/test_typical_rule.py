"""A rule of acceptance that this package does not know reaches Python, the command line and HTTP.

The oracle is the rule written out in NumPy: after each step of a request it judges the step's
drafts anew, by the plain model's logits.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.plan.plan import Plan, make_state_specs
from mtpbuild.builder.program.programs import Program, make_programs
from mtpbuild.builder.program.trace import trace
from mtpbuild.runtime import Engine, Manifest, RequestError, SamplingParams
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.contract.programs import MIXED, StepOutput
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.requests.request import Request
from mtpbuild.runtime.requests.step_controls import make_step_controls
from tests.reference.recompute import row_logits
from tests.reference.sampling import distribution
from tests.support import installed, typical
from tests.support.checkpoints import lower, make_predictable
from tests.support.engines import EngineBuilder
from tests.support.live_server import live
from tests.support.requests import build, build_request
from tests.support.styles import style_of

pytestmark = pytest.mark.xdist_group("predictable")  # another worker would wait for the engines
PROMPT, NEXTN, COUNT = [9, 20, 21, 33], 3, 40
EASY = {"typical_epsilon": 0.02, "typical_delta": 0.5}
WISH: dict[str, Any] = {
    "max_tokens": COUNT,
    "ignore_eos": True,
    "temperature": 1.5,
    "seed": 3,
    "acceptance": "typical",
}
Floats = NDArray[np.float64]


@pytest.fixture(scope="module", autouse=True)
def site_packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the rule, beside the one of another package."""
    with installed.rules_installed(tmp_path_factory.mktemp("site-packages")) as folder:
        yield folder


def stands(p: Floats, draft: int, settings: dict[str, float]) -> bool:
    """Medusa's rule for one draft, under the distribution p [V]."""
    entropy = -sum(x * np.log(x) for x in p if x > 0)
    enough = settings["typical_delta"] * np.exp(-entropy)
    return bool(p[draft] >= min(settings["typical_epsilon"], enough))


class Judge:
    """Observes a request; `wrong` counts steps whose number of tokens is not the oracle's."""

    def __init__(self, model: PlainDeepseek, manifest: Manifest) -> None:
        self.model, self.manifest = model, manifest
        self.wrong = self.kept = self.steps = self.not_strict = 0

    def step(self, request: Request, output: StepOutput, slot: int) -> None:
        known = [*request.prompt, *request.token_ids]
        m, n = int(output.num_drafts[slot]), int(output.num_tokens[slot])
        drafts = output.window[slot, 1 : m + 1].tolist()
        logits = row_logits(self.model, [*known, *drafts])[len(known) - 1 :].double().numpy()
        controls = make_step_controls(request.prompt, request.params, self.manifest)
        controls = replace(controls, temperature=controls.temperature or 1.0)
        settings = dict(request.params.acceptance_settings or {})
        laws = [distribution(row, controls) for row in logits]
        kept = 0
        while kept < m and stands(laws[kept], drafts[kept], settings):
            kept += 1
        self.wrong += n != kept + 1
        self.kept += kept
        self.steps += 1
        self.not_strict += sum(laws[i].argmax() != drafts[i] for i in range(kept))

    def end(self, request: Request, reason: str) -> None:
        pass


def judged(folder: Path, model: PlainDeepseek, **own: Any) -> Judge:
    with Engine.load(folder, threads=1) as engine:
        judge = Judge(model, engine.manifest)
        for settings in (EASY, {"typical_epsilon": 0.5, "typical_delta": 3.0}):
            params = SamplingParams(**WISH | own, acceptance_settings=settings)
            engine.stream(PROMPT, params, observer=judge).result()
    return judge


@pytest.fixture(scope="module")
def engine(with_rules: Callable[[], Path]) -> Path:
    return with_rules()


@pytest.mark.parametrize(
    "target", ["onnxruntime", pytest.param("inductor", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_every_step_keeps_what_the_rule_says(
    target: str,
    temperature: float,
    predictable: PlainDeepseek,
    predictable_engine: EngineBuilder,
    with_rules: Callable[[], Path],
) -> None:
    if target == "onnxruntime":
        folder = with_rules()
    else:
        folder = predictable_engine(NEXTN, acceptance_rules=("typical",), target=target)
    judge = judged(folder, predictable, temperature=temperature)
    assert not judge.wrong
    assert judge.kept, "some drafts stand"
    assert judge.not_strict or not temperature, "some stand that strict acceptance would drop"


def mixed_program(plan: Plan, model: PlainDeepseek) -> Program:
    return next(p for p in make_programs(plan, lower(model)) if p.name == MIXED)


def slots_in_turn(program: Program, slots: int) -> dict[str, Tensor]:
    """Greedy and sampled slots, the last two with the rule."""
    ones = torch.ones(slots)
    given = {
        n: torch.zeros(slots, *t.shape[1:], dtype=t.dtype) for n, t in program.arguments.items()
    }
    for name in ("banned_ids", "bias_ids", "thinking_ids", "synthetic"):
        if name in given:
            given[name] -= 1
    return given | {
        "active": ones > 0,
        "temperature": torch.tensor([0.0, 1.2, 0.0, 1.2]),
        "top_p": ones,
        "sampled_drafts": ones > 0,
        "relaxed_topk": ones.long(),
        "uniforms": torch.rand(given["uniforms"].shape),
        "typical": torch.arange(slots) >= 2,
        "typical_epsilon": 0.02 * ones,
        "typical_delta": 0.5 * ones,
    }


@pytest.mark.full
@pytest.mark.parametrize("target", ["inductor", "tensorrt"])
@torch.no_grad()
def test_the_traced_program_and_the_kernels_say_the_same(target: str) -> None:
    """The eager program without kernels is the reference; slots have the rule or none."""
    torch.set_num_threads(1)
    model = make_predictable(num_hidden_layers=1, num_nextn_predict_layers=1)
    own = Plan(model.config, NEXTN, "mtp-eagle", 4, 100, 4, style_of(target), rules=("typical",))
    style = (
        own.style
        if target == "inductor"
        else GraphStyle(for_gpu=True, whole_caches=True, all_slots=True)
    )
    plain = replace(own, style=style)
    program, reference = mixed_program(own, model), mixed_program(plain, model)
    module = trace(program, own).exported.module() if target == "inductor" else program.module
    torch.manual_seed(1)
    given = slots_in_turn(program, 4)
    state = {
        s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for s in make_state_specs(plain)
    }
    state["lengths"] += 3
    state["window"][:, 0] = torch.randint(61, (4,))
    kept = torch.zeros(4)
    for _ in range(4):
        wanted, outputs = reference.module(state, *(given[n] for n in reference.arguments))
        _, got = module(state, *(given[n] for n in program.arguments))
        for name in ("tokens", "num_tokens"):
            torch.testing.assert_close(got[name], outputs[name])
        state, kept = wanted, kept + outputs["num_tokens"] - 1
    assert (kept[2:] > 0).all()


@pytest.mark.full
def test_the_oracle_finds_a_planted_bug(
    predictable_folder: Path,
    predictable: PlainDeepseek,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rule that takes the larger bound in place of the smaller one."""

    def bug(judged: Any) -> Any:
        p = judged.p
        entropy = -(p * p.clamp(min=1e-30).log()).sum(-1)
        epsilon, delta = (
            judged.controls[f"typical_{name}"][:, None] for name in ("epsilon", "delta")
        )
        return judged.p_draft >= (delta * (-entropy).exp()).maximum(epsilon)

    monkeypatch.setattr(typical, "TYPICAL", replace(typical.TYPICAL, keeps=bug))
    flags: dict[str, Any] = {"acceptance_rules": ("typical",), "out": tmp_path / "bug"}
    (built,) = build(build_request(predictable_folder, (NEXTN,), **flags))
    assert judged(built.folder, predictable).wrong


def test_http_and_python_say_the_same(engine: Path) -> None:
    with (
        Engine.load(engine, threads=1) as loaded,
        live(loaded) as server,
        server.client() as client,
    ):

        def post(**own: Any) -> Any:
            body = {"prompt": PROMPT, "return_token_ids": True, **WISH, **own}
            return client.post("/v1/completions", json=body)

        found = post(**EASY).json()["choices"][0]["token_ids"]
        assert found == list(loaded.generate(PROMPT, typical_params(EASY)).token_ids)
        strict = loaded.generate(PROMPT, SamplingParams(**WISH | {"acceptance": "strict"}))
        assert found != list(strict.token_ids)
        refused = post(typical_epsilon=2).json()["error"]
        assert (refused["param"], refused["message"]) == (
            "typical_epsilon",
            "typical_epsilon must be a number in 0..1, not 2",
        )
        assert "is no setting of" in post(acceptance="strict", **EASY).json()["error"]["message"]
        schema = client.get("/openapi.json").json()["components"]["schemas"]["CompletionBody"]
        assert {"typical_epsilon", "temperature"} <= schema["properties"].keys()


def typical_params(settings: dict[str, float]) -> SamplingParams:
    return SamplingParams(**WISH, acceptance_settings=settings)


def test_the_command_line(engine: Path, site_packages: Path, tmp_path: Path) -> None:
    asked = ["--temperature", 1.5, "--seed", 3, "--acceptance", "typical", "--ignore-eos", "--json"]
    asked += ["--typical-epsilon", 0.02, "--typical-delta", 0.5, "--trace", tmp_path / "t.jsonl"]
    asked += ["--prompt-ids", ",".join(map(str, PROMPT)), "--max-tokens", COUNT, "--threads", 1]
    done = installed.mtpbuild("run", "--engine", engine, *asked, path=(site_packages,))
    assert done.returncode == 0, done.stderr
    with Engine.load(engine, threads=1) as loaded:
        wanted = list(loaded.generate(PROMPT, typical_params(EASY)).token_ids)
    assert json.loads(done.stdout)["token_ids"] == wanted
    output = json.loads((tmp_path / "t.jsonl").read_text().splitlines()[0])["params"]
    assert (output["acceptance"], output["acceptance_settings"]) == ("typical", EASY)


def test_an_engine_says_which_rules_it_has(engine: Path, predictable_engine: EngineBuilder) -> None:
    without = predictable_engine(NEXTN)
    manifests = [read_manifest(folder) for folder in (engine, without)]
    own = ["strict", "rejection", "block", "relaxed", "synthetic"]
    assert [m.capabilities["acceptance"] for m in manifests] == [[*own, *installed.RULES], own]
    assert manifests[0].build.fingerprint != manifests[1].build.fingerprint
    with Engine.load(without, threads=1) as loaded, pytest.raises(RequestError) as caught:
        loaded.generate(PROMPT, typical_params(EASY))
    assert str(caught.value) == (
        "acceptance 'typical' is not in this engine, which has strict, rejection, block, relaxed, "
        "synthetic: build it with `--acceptance-rule` typical"
    )


def test_a_change_of_the_rule_is_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = typical.TYPICAL.identity()
    assert replace(typical.TYPICAL, keeps=lambda judged: judged.p_draft > 0).identity() != before


@pytest.mark.parametrize(
    ("rule", "flags", "says"),
    [
        ("colour", {}, "unknown acceptance rule 'colour'; supported: "),
        (
            "typical",
            {"target": "tensorrt"},
            "--acceptance-rule typical: it has no kernel, which target tensorrt needs",
        ),
    ],
)
def test_what_can_not_be_built_is_refused(
    rule: str, flags: dict[str, str], says: str, smallest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typical, "TYPICAL", replace(typical.TYPICAL, kernel=None))
    with pytest.raises(UsageError) as caught:
        build(build_request(smallest, (1,), acceptance_rules=(rule,), **flags))
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("missing", ["relaxed_topk", "min_p", "synthetic"])
def test_an_older_engine_refuses_what_it_lacks(missing: str, engine: Path) -> None:
    """A manifest without a control's input is one from before the control existed."""
    manifest = read_manifest(engine)
    program = manifest.programs[MIXED]
    inputs = tuple(t for t in program.inputs if t.name != missing)
    older = manifest.model_copy(
        update={"programs": {MIXED: program.model_copy(update={"inputs": inputs})}}
    )
    rejecting: dict[str, Any] = {"acceptance": "rejection", "rejection_sample_method": "synthetic"}
    wish = {
        "relaxed_topk": SamplingParams(
            relaxed_topk=3, begin_thinking_phase_token=1, end_thinking_phase_token=2
        ),
        "min_p": SamplingParams(min_p=0.1, temperature=1.0),
        "synthetic": SamplingParams(temperature=1.0, synthetic_acceptance_length=1.5, **rejecting),
    }[missing]
    assert make_step_controls(PROMPT, wish, manifest)
    assert make_step_controls(PROMPT, SamplingParams(), older).plain
    says = r"^[a-z_]+ is not supported by this engine: .* is older"
    with pytest.raises(RequestError, match=says):
        make_step_controls(PROMPT, wish, older)
