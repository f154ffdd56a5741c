"""Training of MTP modules: chains against steps one by one, gradients against the plain loss."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mtpbuild.builder.compiler.draft_vocab import DRAFT_VOCAB
from mtpbuild.builder.compiler.source import find_source
from mtpbuild.builder.models import load_config
from mtpbuild.builder.models.common.plain import PlainCausalLM
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import ignore
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.builder.weights.head import join_head, refuse_other_trunk
from mtpbuild.builder.weights.layer_passes import StreamedModel, make_batches
from mtpbuild.lab.measure.own_texts import OwnAnswer, read_answers
from mtpbuild.lab.tune import training, tune_head
from mtpbuild.lab.tune.chains import run_chain
from mtpbuild.lab.tune.new_head import PROMPTS, TURNS, write_new_head, write_prompts
from mtpbuild.lab.tune.training import (
    Batch,
    Trainer,
    Training,
    backward,
    make_model_batches,
    measure_acceptance,
)
from mtpbuild.lab.tune.tune_head import REPORT, write_head
from mtpbuild.lab.verify.quality import acceptance_length
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.configuration.input_file import read_requests
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.errors import BuildError, UsageError
from tests.support.checkpoints import make_predictable
from tests.support.families import make_family, save_family
from tests.support.invoke import invoke, refusal
from tests.support.stand_ins import failing

CHAINS = [("gigachat", False), ("gigachat", True), ("glm-4.6", True), ("mimo", False),
          ("mimo", True), ("qwen3.5", True)]  # fmt: skip
EAGLE = Training(nextn=3, eagle=True, lora=None, dtype="fp32", lr=0.01, epochs=12)
VANILLA = replace(EAGLE, nextn=2, eagle=False)
FEW_IDS = range(7, 50)
FEW = replace(EAGLE, draft_ids=(*FEW_IDS,))
PROMPT, ANSWER = 4, 20  # tokens


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 61, shape, generator=torch.Generator().manual_seed(seed))


def step_by_step(plain: PlainCausalLM, text: Tensor, place: int, nextn: int) -> list[Tensor]:
    """Run module 1 for the drafts of one step alone, after which the text goes on as it does."""
    hidden, found = plain.main(text)[:, : place + 1], list[Tensor]()
    for j in range(nextn):
        g = plain.mtp(1, text[:, 1 : place + 2 + j], hidden, later=j)[:, -1:]
        hidden = torch.cat([hidden, g], dim=1)
        found.append(g[0, 0])
    return found


@pytest.mark.parametrize(("name", "eagle"), CHAINS)
@torch.no_grad()
def test_a_chain_has_the_drafts_of_every_step(name: str, eagle: bool) -> None:
    plain, text, nextn = make_family(name), drawn(1, 14), 3 if eagle else 2
    chain = [g for _, g in run_chain(plain, text, plain.main(text), nextn, eagle)]
    for place in (0, 1, 5, 9):
        if eagle:
            wanted = step_by_step(plain, text, place, nextn)
        else:
            one = plain.mtp(1, text[:, 1 : place + 2], plain.main(text)[:, : place + 1])
            two = plain.mtp(2, text[:, 2 : place + 3], one)
            wanted = [one[0, -1], two[0, -1]]
        for g, other in zip(chain, wanted, strict=True):
            torch.testing.assert_close(g[0, place], other, atol=1e-5, rtol=1e-4)


def batch_of(plain: PlainCausalLM, folder: Path, tokens: Tensor) -> Batch:
    with torch.no_grad():
        save_file({"hidden": plain.main(tokens)}, folder / "0.safetensors")
    return Batch(tokens, torch.tensor([3, 5]), folder / "0.safetensors")


@pytest.mark.parametrize("how", [EAGLE, VANILLA, FEW], ids=["eagle", "vanilla", "few tokens"])
def test_gradients_are_those_of_the_whole_loss(
    how: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "ROWS", 5)
    plain = make_family("gigachat")
    take_rows_of_head(plain, how)
    plain.requires_grad_(False)
    batch = batch_of(plain, tmp_path, drawn(2, 12))
    weights = [w for k in how.modules for w in plain.module(k).requires_grad_().parameters()]
    found = backward(plain, batch, how)
    gradients = [weight.grad for weight in weights]

    hidden = plain.main(batch.tokens)
    losses = list[Tensor]()
    for j, (k, g) in enumerate(run_chain(plain, batch.tokens, hidden, how.nextn, how.eagle), 1):
        for row, first in enumerate(batch.first.tolist()):
            for q in range(first, 12 - j):
                if how.draft_ids and (q + j == 11 or batch.tokens[row, q + j + 1] not in FEW_IDS):
                    continue
                output = plain.logits(hidden[row, q + j]) * training.SHARPNESS
                drafted = plain.draft_logits(k, g[row, q]).log_softmax(-1)
                losses.append(-(output.softmax(-1) * drafted).sum())
    loss = torch.stack(losses).mean()
    assert found == pytest.approx(loss.item(), rel=1e-4)
    whole = torch.autograd.grad(loss, weights, materialize_grads=True)
    for gradient, wanted in zip(gradients, whole, strict=True):  # none: of an expert without tokens
        found_one = torch.zeros_like(wanted) if gradient is None else gradient
        torch.testing.assert_close(found_one, wanted, atol=1e-5, rtol=1e-3)


def take_rows_of_head(plain: PlainCausalLM, how: Training) -> None:
    if how.draft_ids:
        plain.lm_head.weight = nn.Parameter(plain.lm_head.weight[[*how.draft_ids]])


@pytest.mark.parametrize("how", [EAGLE, FEW], ids=["all", "few tokens"])
@torch.no_grad()
def test_acceptance_by_position_is_that_of_single_steps(how: Training, tmp_path: Path) -> None:
    plain = make_predictable()
    _, tokens = written(plain, 2, seed=3)
    save_file({"hidden": plain.main(tokens)}, tmp_path / "0.safetensors")
    take_rows_of_head(plain, how)
    ids = torch.tensor(how.draft_ids or range(plain.config.vocab_size))
    wanted, places = [0] * how.nextn, 0
    for text in tokens[:, None]:
        for place in range(PROMPT - 1, tokens.shape[1] - how.nextn - 1):
            drafts = [
                plain.draft_logits(1, g).argmax() for g in step_by_step(plain, text, place, 3)
            ]
            after = text[0, place + 2 :]
            right = [bool(ids[d] == t) for d, t in zip(drafts, after, strict=False)]
            places += 1
            for j in range(how.nextn):
                wanted[j] += all(right[: j + 1])
    batch = Batch(tokens, torch.tensor([PROMPT - 1] * 2), tmp_path / "0.safetensors")
    measured = measure_acceptance(plain, [batch], how)
    assert 0 < measured[0] < 1
    assert measured == pytest.approx([count / places for count in wanted])


@torch.no_grad()
def forgetful(folder: Path, name: str = "mimo") -> tuple[Path, PlainCausalLM]:
    """Save a model whose modules know nothing of what its trunk says."""
    plain = make_family(name)
    for k in range(1, plain.config.num_nextn_predict_layers + 1):
        for weight in plain.module(k).parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.1)
    return save_family(folder / name, name, plain), plain


@torch.no_grad()
def written(plain: PlainCausalLM, count: int, seed: int) -> tuple[list[list[int]], Tensor]:
    """Return prompts, and the whole greedy texts."""
    tokens = drawn(count, PROMPT, seed=seed)
    for _ in range(ANSWER):
        tokens = torch.cat([tokens, plain.logits(plain.main(tokens))[:, -1:].argmax(-1)], dim=1)
    return tokens[:, :PROMPT].tolist(), tokens


def trainer_of(
    place: Path, folder: Path, plain: PlainCausalLM, how: Training, watch: Any = ignore
) -> Trainer:
    checkpoint = open_checkpoint(folder)
    _, texts = written(plain, 24, seed=1)
    batches = make_batches(texts.tolist())
    state = place / "state"
    state.mkdir(exist_ok=True)
    files = list[Path]()
    for b, tokens in enumerate(batches):
        files.append(state / f"{b}.safetensors")
        with torch.no_grad():
            save_file({"hidden": plain.main(tokens)}, files[-1])
    model = StreamedModel(checkpoint, checkpoint.settle(load_config(folder)), batches)
    rows = make_model_batches(model, [PROMPT - 1] * len(texts), files)
    return Trainer(model, [*rows] * 10, how, state, watch)


def shifted(*args: Any) -> Iterator[tuple[int, Tensor]]:
    """Return the bug: a place gets what the place before it drafted."""
    return ((k, g.roll(1, dims=1)) for k, g in run_chain(*args))


@pytest.mark.parametrize(
    ("how", "bug", "least", "most"),
    [
        (EAGLE, None, 2.5, 4),
        pytest.param(replace(VANILLA, dtype="bf16"), None, 2.2, 3, marks=pytest.mark.full),
        pytest.param(replace(EAGLE, lora=8), None, 2.2, 4, marks=pytest.mark.full),
        pytest.param(EAGLE, shifted, 1, 1.5, marks=pytest.mark.full),
    ],
    ids=["eagle", "vanilla bf16", "lora", "shifted"],
)
def test_acceptance_rises_on_other_texts(
    how: Training,
    bug: Callable[..., Any] | None,
    least: float,
    most: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training, "run_chain", bug or run_chain)
    folder, plain = forgetful(tmp_path)
    prompts, texts = written(plain, 6, seed=2)

    def measure() -> float:
        answers = texts[:, PROMPT:].tolist()
        return acceptance_length(plain, prompts, answers, how.nextn, how.eagle)

    assert measure() < 1.4
    trainer = trainer_of(tmp_path, folder, plain, how)
    weights = trainer.run()
    trunk = {n: w.clone() for n, w in plain.state_dict().items() if n not in weights}
    plain.load_state_dict(weights, strict=False)
    assert least <= measure() <= most
    write_head(trainer.model, weights, tmp_path)
    joined = join_head(open_checkpoint(folder), tmp_path, plain.config)
    for n in plain.state_dict():
        same = trainer.model.family.duplicates(plain.config).get(n, n)
        torch.testing.assert_close(joined.read(same), weights.get(n, trunk.get(n)))


@pytest.mark.parametrize("how", [EAGLE, replace(VANILLA, lora=2)], ids=["whole", "lora"])
def test_a_training_goes_on(how: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut off after some steps, and the weights are those of one that never was."""
    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
    how = replace(how, epochs=1)
    folder, plain = forgetful(tmp_path)
    wanted = trainer_of(tmp_path, folder, plain, how).run()
    (tmp_path / "state" / training.STATE).unlink()

    def cut_off(text: str) -> None:
        if text.startswith("train: step 4 "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, folder, plain, how, cut_off).run()
    seen = list[str]()
    found = trainer_of(tmp_path, folder, plain, how, seen.append).run()
    assert re.match(r"train: step 4 of 10, 3,456 tokens, (about )?\d+ (s|min) left, loss ", seen[0])
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# Commands


def data_of(folder: Path, count: int = 40) -> Path:
    lines = [{"input_ids": ids, "output_tokens": ANSWER} for ids in drawn(count, PROMPT).tolist()]
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.full
def test_a_head_for_ones_own_prompts(tmp_path: Path) -> None:
    """The command fails once, after the training, and goes on; refit and build take its head."""
    folder, _ = forgetful(tmp_path)
    head = tmp_path / "head"
    command = ["tune-head", "--model", folder, "--data", data_of(tmp_path), "--out", head]
    command += ["--nextn", 2, "--epochs", 100, "--lr", 0.01, "--held-out", 6]
    with failing(tune_head, "measure", BuildError("no room")):
        code, _, err = invoke(*command)
    assert (code, err.splitlines()[-1], head.exists()) == (1, "error: no room", False)
    again = AssertionError("it was done before")
    with failing(tune_head, "write_prompts", again), failing(training, "backward", again):
        code, out, err = invoke(*command)
    assert code == 0, err
    report = json.loads((head / REPORT).read_text())
    assert report["after"] > report["before"] + 0.5
    assert report["same"] == report["prompts"] == 6
    assert "acceptance length of mtp-vanilla at nextn 2 on 6 held-out prompts" in out
    assert {path.name for path in tmp_path.iterdir()} == {"mimo", "prompts.jsonl", "head"}
    assert "is not a checkpoint" in refusal(*command[:3], *command[3:5], "--out", tmp_path, code=1)


REFUSALS = [
    (("--dtype", "int8"), "--dtype int8 is unknown; supported: fp32, bf16"),
    (("--lora", "0"), "--lora 0 is outside 1..4096"),
    (("--max-tokens", "0"), "--max-tokens 0 is outside 1..16777216"),
    (("--epochs", "0"), "--epochs 0 is outside 1..10000"),
    (("--lr", "nan"), "--lr nan must be above 0 and at most 1"),
    (("--lr", "-1"), "--lr -1 must be above 0 and at most 1"),
    (("--nextn", "0"), "--nextn 0 is outside 1..15"),
    (("--held-out", "40"), "--held-out 40 is outside 1..39"),
    (("--data", "none.jsonl"), "--data none.jsonl: can't be read (No such file or directory)"),
    (("--data", "bad.jsonl"), "bad.jsonl:2: answer: "),
    (
        ("--data", "said.jsonl"),
        "said.jsonl:1: its last message is an answer, which the model",
    ),
    (("--data", "one.jsonl"), "one.jsonl: has one prompt, and needs others to measure with"),
    (("--out", "."), "exists and is not a checkpoint; choose another --out"),
    (("--drafter", "mtp-vanilla", "--nextn", "4"), "needs 4 MTP modules"),
    (("--prompts-by-model", "9"), "give --data FILE or --prompts-by-model N, one of them"),
    (("--new", "--mtp", "head"), "--new begins with a module of its own: leave --mtp out"),
    (("--new", "--drafter", "mtp-vanilla"), "which drafts by --drafter mtp-eagle"),
    (("--new",), "has MTP modules: leave --new out"),
    (("--draft-vocab", "999999"), "--draft-vocab 999999 is outside 1.."),
]


@pytest.mark.parametrize(("flags", "why"), REFUSALS)
def test_refusals(
    flags: tuple[str, ...], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, _ = forgetful(tmp_path)
    data_of(tmp_path)
    Path("one.jsonl").write_text('{"prompt": "a"}\n')
    Path("said.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n')
    Path("bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": "a", "answer": "b"}\n')
    given = {"--model": str(folder), "--data": "prompts.jsonl", "--out": "head"}
    new = flags[:1] == ("--new",)
    named = flags[1:] if new else flags
    given |= dict(zip(named[::2], named[1::2], strict=True))
    code = 1 if "--out" in flags else 2
    command = ["tune-head", *chain.from_iterable(given.items())]
    output = refusal(*command, *["--new"] * new, code=code)
    assert why in output
    assert not [*tmp_path.glob(".*")]


def test_a_new_module_begins_as_a_copy_of_the_last_layer(tmp_path: Path) -> None:
    """Its folder is a head of this trunk alone, and of copies with other roundings."""
    folder = save_family(tmp_path / "trunk", "llama", make_family("llama"))
    head = tmp_path / "head"
    checkpoint = open_checkpoint(folder)
    write_new_head(checkpoint, find_source(BuildRequest(str(folder), nextn=(0,))), head)
    config = load_config(folder, modules=1)
    joined = join_head(checkpoint, head, config)
    joined.check(joined.settle(config, drafts=True))
    last, module = f"model.layers.{config.num_hidden_layers - 1}.", f"{config.name_module(0)}."
    copied = [name for name in checkpoint.tensors if name.startswith(last)]
    for name in copied:
        stored = joined.read(module + name.removeprefix(last))
        torch.testing.assert_close(stored, checkpoint.read(name).bfloat16().float())
    assert len(copied) == 9

    rounded = make_family("llama")
    embedding = rounded.model.embed_tokens.weight
    embedding.data += 0.1 * embedding.data.std() * torch.randn(embedding.shape)
    refuse_other_trunk(open_checkpoint(save_family(tmp_path / "copy", "llama", rounded)), head)
    other = save_family(tmp_path / "other", "llama", make_family("llama", seed=1))
    output = refusal("build", "--model", other, "--nextn", 3, "--mtp", head, code=1)
    assert "head: this head was made for trunk, whose embedding is another" in output


def test_prompts_that_a_model_writes(tiny_engine: Callable[..., Path], tmp_path: Path) -> None:
    with Engine.load(tiny_engine(3)) as engine:
        with pytest.raises(UsageError, match=r"--prompts-by-model 6: the model wrote \d"):
            write_prompts(engine, 6, 7, tmp_path, ignore)
        assert not (tmp_path / PROMPTS).is_file()
        write_prompts(engine, 6, 1, tmp_path, ignore)
        requests = read_requests(tmp_path / PROMPTS, engine, SamplingParams(max_tokens=1))
        before = engine.chat_ids([{"role": "user", "content": "x"}])[:2]
        turns = read_answers(tmp_path / TURNS)
        assert engine.tokenizer is not None
        ended = [
            engine.tokenizer.text(turn.answer).strip() for turn in turns if len(turn.answer) < 128
        ]
    lines = (tmp_path / PROMPTS).read_text(encoding="utf-8").splitlines()
    written = [json.loads(line)["messages"] for line in lines]
    assert written == [[{"role": "user", "content": text}] for text in ended if len(text) >= 8]
    assert len(turns) == 6
    assert len({(*turn.answer,) for turn in turns}) > 1
    assert 0 < len(requests) <= 6
    assert all(request.token_ids[:2] == before == turns[0].prompt[:2] for request in requests)


@pytest.mark.full
def test_a_head_for_a_trunk_that_has_none(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "trunk", "qwen3", make_family("qwen3"))
    head = tmp_path / "head"
    command = ["tune-head", "--new", "--model", folder, "--data", data_of(tmp_path, 200)]
    command += ["--out", head, "--nextn", 2, "--epochs", 60, "--lr", 0.01, "--draft-vocab", 48]
    code, _, err = invoke(*command)
    assert code == 0, err
    report = json.loads((head / REPORT).read_text())

    assert report["before"] == 1
    assert report["after"] > 1.2
    assert report["accepted"][0] > 0.2
    assert report["same"] == report["prompts"] == 20
    assert len(json.loads((head / DRAFT_VOCAB).read_text())) == 48
    engine = tmp_path / "engine"
    code, _, err = invoke("build", "--model", folder, "--mtp", head, "--nextn", 2, "--out", engine)
    assert code == 0, err
    assert read_manifest(engine).build.draft_vocab == 48


def test_what_no_machine_has_and_no_module_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is said before anything is built; modules that choose rows make one draft."""
    folder, plain = forgetful(tmp_path)
    command = ("tune-head", "--data", data_of(tmp_path), "--out", tmp_path / "head", "--model")
    monkeypatch.setattr(tune_head, "measure_memory", lambda: 10**6)
    output = refusal(*command, folder)
    assert "MB of memory, and this machine has 1.00 MB: --lora 16 takes less" in output
    glm = save_family(tmp_path / "glm", "glm-5", make_family("glm-5"))
    assert "--nextn 1 --drafter mtp-vanilla" in refusal(*command, glm)
    assert EAGLE.memory(plain, 9) > replace(EAGLE, lora=1).memory(plain, 9)


def test_answers_that_end_before_a_step() -> None:
    assert tune_head.tokens_per_step([OwnAnswer([5], [1], 0, 0)]) == 1
    assert tune_head.tokens_per_step([OwnAnswer([5], [1, 2, 3, 4], 2, 3)]) == 2
