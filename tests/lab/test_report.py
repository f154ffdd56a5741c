"""`mtpbuild report`: what it measures and says, and that it has nothing of the user's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from mtpbuild.builder.plan import plan
from mtpbuild.builder.plan.recipe import find_recipe, find_recipe_folder
from mtpbuild.builder.plan.weight_classes import load_recipe_config
from mtpbuild.lab.forecast.forecast import PUBLISHED_ACCEPTANCE
from mtpbuild.lab.measure.prompts import Prompt
from mtpbuild.lab.measure.runs import TimedAnswer
from mtpbuild.lab.report import report as module
from mtpbuild.lab.report.page import render_report
from mtpbuild.lab.report.published import find_published, read_published
from mtpbuild.lab.report.redaction import redact
from mtpbuild.lab.report.sections import ReportSize, judge, measure_acceptance
from mtpbuild.lab.verify.plain import load_plain, open_view, run_by_layers
from mtpbuild.runtime import SamplingParams
from mtpbuild.runtime.requests.stats import SpeculativeDecoding
from tests.support.checkpoints import SHAPES, random_checkpoint
from tests.support.engines import write_engine
from tests.support.fakes import fake_manifest
from tests.support.invoke import invoke, refusal

RECIPES = find_recipe_folder()
NAME = "annas-secret"


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure little, in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "QUICK", ReportSize(1, 8, 1))


def report(*flags: object) -> tuple[dict[str, Any], str]:
    """Run the command; return its JSON and what it printed, after a look for what is private."""
    code, out, err = invoke("report", *flags, "--quick", "--out", "out")
    assert code == 0, err
    texts = [Path("out", f"report.{ending}").read_text() for ending in ("json", "html")]
    lines = (RECIPES / "calibration" / "prompts.jsonl").read_text().splitlines()
    prompt = json.loads(lines[0])["messages"][0]["content"]
    private = [NAME, str(Path.cwd()), str(RECIPES), prompt, "def malloc"]
    assert [(name, text[:99]) for name in private for text in texts if name in text] == []
    assert texts[1].startswith("<!DOCTYPE html>")
    return json.loads(texts[0]), out + err


def test_an_engine(tiny_engine: Callable[..., Path]) -> None:
    """Its link has a name that does not get into the files, nor does its checkpoint's."""
    Path(NAME).symlink_to(tiny_engine(3))
    Path(f"{NAME}-weights").symlink_to(RECIPES / "deepseek_tiny")
    found, said = report(NAME, "--checkpoint", f"{NAME}-weights", "--threads", 1)
    assert "drafts: 3 a step, by mtp-vanilla" in said
    assert found["problems"] == found["warnings"] == []
    assert (found["model"]["recipe"], found["model"]["parameters"]) == (None, 10_179_208)
    assert found["verify"]["verdict"] == "passed"
    assert found["verify"]["tokens"] == 3 * 8
    assert found["verify"]["plain_first_drafts"] > 0.3
    assert [*found["acceptance"]] == ["all", "code", "reasoning", "chat"]
    assert len(found["acceptance"]["all"]["acceptance_lengths"]) == 3
    (speed,) = found["speed"]
    assert speed["nextn"] == 3
    assert speed["same_texts"] == 1
    assert found["forecast"]["nextn"] == [0, 1, 2, 3]
    assert {"config.json", "tokenizer.json"} < found["hashes"].keys()
    assert "command" not in found["machine"]


def test_refusals(tmp_path: Path) -> None:
    assert "neither a recipe nor a checkpoint folder" in refusal("report", "no such", code=2)
    (tmp_path / "file").write_text("")
    assert "can't write there" in refusal("report", "deepseek-tiny", "--out", "file")
    write_engine(tmp_path / "split", fake_manifest(ranks=1))
    broken = tmp_path / "split" / "engine.json"
    broken.write_text(broken.read_text()[:-9])
    assert "not readable as JSON" in refusal("report", "split", "--out", "out", code=1)
    assert [*Path("out").iterdir()] == [], "nothing is half-written"


@pytest.mark.parametrize("shape", ["yarn-three-modules", "no-q-lora-one-module"])
def test_layers_one_by_one_are_the_whole_model(shape: str, tmp_path: Path) -> None:
    """Logits of all positions, and the drafts of the first module."""
    random_checkpoint(tmp_path, **SHAPES[shape])
    config, view = open_view(tmp_path)
    texts = [[5, 9, 11, 30, 2, 7], [8, 60, 3]]
    model = load_plain(tmp_path)
    runs = run_by_layers(config, view, texts, drafts=True)
    with torch.no_grad():
        for text, (logits, drafts) in zip(texts, runs, strict=True):
            tokens = torch.tensor([text])
            hidden = model.main(tokens)
            torch.testing.assert_close(logits, model.logits(hidden)[0], atol=1e-5, rtol=1e-5)
            module_1 = model.mtp(1, tokens[:, 1:], hidden[:, :-1])
            assert drafts is not None
            assert drafts.tolist() == model.draft_logits(1, module_1)[0].argmax(-1).tolist()


def test_acceptance_by_position() -> None:
    """A request's first step has no drafts, and does not count."""
    drafting = SpeculativeDecoding(None, None, [], [3, 1, 2], 6, 5, 10, 2)
    answer = TimedAnswer(Prompt("", 0, [1], SamplingParams()), token_ids=[1] * 11)
    answer.statistics = drafting
    assert measure_acceptance([answer]) == {
        "prompts": 1,
        "tokens": 11,
        "steps_with_drafts": 5,
        "accepted_by_position": [3 / 5, 2 / 5],
        "acceptance_lengths": [1 + 3 / 5, 2.0],
    }


@pytest.mark.parametrize(
    ("engine", "plain", "says"),
    [
        (0.8, 0.85, None),
        (0.3, 0.35, None),
        (0.02, 0.03, "the head is another model's"),
        (0.02, 0.8, "the engine drafts worse than its checkpoint"),
        (None, 0.8, None),
        (0.02, None, None),
    ],
)
def test_a_head_is_judged_beside_the_plain_model(
    engine: float | None, plain: float | None, says: str | None
) -> None:
    acceptance = {"accepted_by_position": [] if engine is None else [engine, 0.0]}
    lines = judge(acceptance, {} if plain is None else {"plain_first_drafts": plain})
    assert len(lines) == (says is not None)
    assert (says or "") in "".join(lines)


def test_the_published_lengths() -> None:
    """Each has a source and lengths that are possible; R1's are those that `plan` uses."""
    rows = read_published()
    r1 = next(row for row in rows if row["model"] == "DeepSeek-R1 FP4")
    assert [1.0, *r1["lengths"].values()] == [*PUBLISHED_ACCEPTANCE]
    for row in rows:
        assert row["source"].startswith("https://")
        assert all(1 < length <= int(k) + 1 for k, length in row["lengths"].items())
    names = ("deepseek-r1-fp4", "qwen3.5-0.8b", "qwen3.5-27b", "glm-5.2", "mimo-7b-rl")
    known = {name: find_published(_config(name)) for name in (*names, "qwen3.5-4b")}
    counts = {name: len(rows) for name, rows in known.items()}
    assert counts == {**dict.fromkeys(names, 1), names[0]: 2, "qwen3.5-27b": 2, "qwen3.5-4b": 0}


def _config(name: str) -> Any:
    recipe = find_recipe(name)
    assert recipe is not None
    return load_recipe_config(recipe)


def test_names_and_paths_are_taken_out() -> None:
    lines = ["/srv/x/y.json: bad", f"engines/{NAME}_n3: {NAME} is not whole", "12 tokens/s, 1/2"]
    url = {"source": "https://github.com/a/b", "detail": lines, NAME: 3, "home": str(Path.home())}
    assert redact(url, [NAME]) == {
        "source": "https://github.com/a/b",
        "detail": ["[path]: bad", "engines/[name]_n3: [name] is not whole", "12 tokens/s, 1/2"],
        NAME: 3,
        "home": "[name]",
    }


def test_a_joined_heads_place_is_private(tmp_path: Path) -> None:
    manifest = fake_manifest()
    model = manifest.model.model_copy(update={"head": f"its MTP module from {NAME}"})
    write_engine(tmp_path / "engine", manifest.model_copy(update={"model": model}))
    subject = module.Subject(tmp_path / "engine", "deepseek-tiny", None, None)
    names = subject.list_names(module.ReportRequest("engine"))
    assert {NAME, "engine", "fake", str(tmp_path / "engine")} < {*names}
    assert {"deepseek-tiny", "tiny"}.isdisjoint(names), "a recipe's names are public"


def test_the_page() -> None:
    document = {
        "machine": {"cpu": "<EPYC>", "bytes": 1234567},
        "acceptance": {"all": {"rates": [0.51239, 0.25]}, "code": {"rates": []}},
        "speed": [{"nextn": 0, "ok": True}, {"nextn": "auto"}],
        "problems": [],
        "nothing": None,
    }
    page = render_report(document)
    assert page.index("problems") < page.index("acceptance") < page.index("machine")
    rows = "<tr><td>all<td>0.5124 0.25<tr><td>code<td>none</table>"
    for part in ("<td>&lt;EPYC&gt;", "<td>1,234,567", rows, "<tr><td>auto<td>"):
        assert part in page


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `auto` make one draft at most, which is six programs to compile."""
    monkeypatch.setattr(plan, "ADAPTIVE_NEXTN", 1)


@pytest.mark.full
@pytest.mark.parametrize("wrong", [False, True])
def test_a_model_whose_drafts_are_right_or_wrong(wrong: bool, few: None) -> None:
    """The engine is built; a head of noise is told by the plain model's drafts, too."""
    folder = _copy_tiny("qwen_tiny")
    if wrong:
        _change_weights(folder, lambda name, w: torch.randn_like(w) if "mtp." in name else w)
    found, said = report(folder, "--threads", 1)
    assert "drafts: 0 to 1 a step, by mtp-eagle, its MTP module" in said
    assert [speed["nextn"] for speed in found["speed"]] == [0, 1, "auto"]
    assert all(speed["same_texts"] == 1 for speed in found["speed"])
    assert found["verify"]["verdict"] == "passed"
    assert (found["verify"]["plain_first_drafts"] < 0.1) == wrong
    assert any("the head is another model's" in line for line in found["problems"]) == wrong


@pytest.mark.full
@pytest.mark.parametrize("tokenizer", [True, False])
def test_a_model_of_transformers_without_a_head(tokenizer: bool) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = Qwen3Config(vocab_size=2048, eos_token_id=1, bos_token_id=0, **sizes, **heads)
    Qwen3ForCausalLM(config).save_pretrained(NAME)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if tokenizer:
            Path(NAME, name).write_text((RECIPES / "qwen_tiny" / name).read_text())
    found, said = report(NAME, "--threads", 1, "--no-hashes")
    assert "no drafts: it has no head" in said
    lines = ["the checkpoint has no MTP head: nothing is drafted"]
    lines += [] if tokenizer else ["there is no tokenizer: the prompts are arbitrary tokens"]
    assert found["problems"] == lines
    assert "hashes" not in found
    assert found["verify"]["verdict"] == "passed"
    assert [speed["nextn"] for speed in found["speed"]] == [0]
    assert ("arbitrary tokens" in found["acceptance"]) == (not tokenizer)


def _copy_tiny(name: str) -> Path:
    folder = Path(NAME)
    folder.mkdir()
    for path in (RECIPES / name).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def _change_weights(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    weights = load_file(folder / "model.safetensors")
    changed = {name: change(name, weight) for name, weight in weights.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
