"""Oracles O1 and O2 on the model that the repository ships, as a user runs it."""

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from filelock import FileLock

from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.plan.plan import DrafterName
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.runtime import Engine, SamplingParams
from tests.reference.recompute import row_logits
from tests.support.checkpoints import load_reference
from tests.support.engines import greedy_ids
from tests.support.prompts import CODE, QUESTIONS
from tests.support.transformers_oracle import transformers_greedy, transformers_model

pytestmark = pytest.mark.xdist_group("tiny")  # another worker would wait for the same engines
CHUNK, OUTPUT = 32, 64  # of the fixture's engines; tokens of a text
TIE = 1e-3  # fp32 kernels for one and for four tokens round differently
# What a broken drafter would not reach; the card has what the shipped one does.
MEAN_ACCEPTANCE_LENGTH = {1: 1.4, 2: 1.6, 3: 1.8, 4: 1.8}
TinyEngine = Callable[..., Path]
DRAFTED = [
    pytest.param(3, "mtp-vanilla"),
    *(pytest.param(k, "mtp-vanilla", marks=pytest.mark.full) for k in (1, 2)),
    *(pytest.param(k, "mtp-eagle", marks=pytest.mark.full) for k in (1, 2, 3, 4)),
]


@pytest.fixture(scope="session")
def prompts(tiny_engine: TinyEngine) -> list[list[int]]:
    """Code, questions, and lengths 1, 2, 3 and around a chunk's border."""
    with Engine.load(tiny_engine(0), prefix_cache=False) as engine:
        code = [engine.encode(text) for text in CODE]
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        questions = [engine.chat_ids(chat) for chat in chats]
    long = [token for ids in code for token in ids]
    return [*code, *questions, *(long[:n] for n in (1, 2, 3, CHUNK, CHUNK + 1, CHUNK + 2, 100))]


@pytest.fixture(scope="session")
def baseline(
    tiny_engine: TinyEngine, prompts: list[list[int]], shared_folder: Path
) -> list[list[int]]:
    """Compute, in one worker, what the engine without drafts says."""
    path = shared_folder / "tiny_baseline.json"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            ids = greedy_ids(tiny_engine(0), prompts, OUTPUT)
            path.write_text(json.dumps(ids))
    texts: list[list[int]] = json.loads(path.read_text())
    return texts


@pytest.fixture(scope="session")
def reference() -> PlainDeepseek:
    torch.set_num_threads(1)
    return load_reference(find_model("deepseek-tiny").folder)


def equal_but_ties(
    prompts: list[list[int]],
    ours: list[list[int]],
    theirs: list[list[int]],
    reference: PlainDeepseek,
) -> None:
    """95 % of texts are equal; where one parts, the two tokens' logits are a near-tie."""
    parted = 0
    for prompt, a, b in zip(prompts, ours, theirs, strict=True):
        if a == b:
            continue
        parted += 1
        place = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        logits = row_logits(reference, prompt + a[:place])[-1]
        assert float((logits[a[place]] - logits[b[place]]).abs()) < TIE
        assert float(logits.max() - logits[a[place]]) < TIE
    assert parted <= len(prompts) * 0.05


def test_engine_equals_transformers(
    prompts: list[list[int]], baseline: list[list[int]], reference: PlainDeepseek
) -> None:
    """O1, on a part of the prompts: transformers takes 20 ms per token."""
    torch.set_num_threads(1)
    model = transformers_model(find_model("deepseek-tiny").folder)
    some = [0, 20, -6, -1]
    chosen = [prompts[i] for i in some]
    theirs = [transformers_greedy(model, prompt, 32) for prompt in chosen]
    equal_but_ties(chosen, [baseline[i][:32] for i in some], theirs, reference)


@pytest.mark.parametrize(("nextn", "drafter"), DRAFTED)
def test_drafts_change_nothing_but_speed(
    nextn: int,
    drafter: DrafterName,
    tiny_engine: TinyEngine,
    prompts: list[list[int]],
    baseline: list[list[int]],
    reference: PlainDeepseek,
) -> None:
    """O2, with drafts that are accepted: tokens per step must show it."""
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    with Engine.load(tiny_engine(nextn, drafter), threads=1, prefix_cache=False) as engine:
        results = engine.generate(prompts, params)
    equal_but_ties(prompts, [list(r.token_ids) for r in results], baseline, reference)
    drafting = [r.metrics.speculative_decoding for r in results]
    steps, accepted = (
        sum(getattr(d, name) for d in drafting)
        for name in ("num_spec_steps", "num_accepted_draft_tokens")
    )
    assert 1 + accepted / steps > MEAN_ACCEPTANCE_LENGTH[nextn]


def test_text_is_the_same_for_every_nextn(tiny_engine: TinyEngine) -> None:
    """The comparison is a user's: text in, text out, EOS respected."""
    question = [{"role": "user", "content": QUESTIONS[0]}]
    texts = []
    for nextn in (0, 3):
        with Engine.load(tiny_engine(nextn), prefix_cache=False) as engine:
            prompts = [CODE[0], engine.chat_prompt(question)]
            results = engine.generate(prompts, SamplingParams(max_tokens=200))
            texts.append([result.text for result in results])
    assert texts[0] == texts[1]
    assert texts[0][1].strip()


def test_a_step_has_few_nodes(tiny_engine: TinyEngine) -> None:
    """What it costs onnxruntime to begin one is paid 37 times, not hundreds of times."""
    engine = tiny_engine(3)
    for name, most in {"decode": 40, "prefill": 20}.items():
        graph = onnx.load(engine / f"{name}.onnx", load_external_data=False).graph
        assert len(graph.node) <= most
