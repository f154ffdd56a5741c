"""The flags of vLLM and TensorRT-LLM on `run` and `build`, with the inputs that users paste."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.runtime.contract.controls import GREEDY, StepControls
from mtpbuild.runtime.ranks import Ranks
from tests.support.engines import write_engine
from tests.support.fakes import THINKING, FakePrograms, continuation, fake_manifest
from tests.support.invoke import invoke
from tests.support.registry import programs_by
from tests.support.requests import noted

# As in TensorRT-LLM's blog, and in vllm-ascend's pages.
BLOG = """use_cuda_graph: true
moe_backend: TRTLLM
speculative_config:
    decoding_type: MTP
    num_nextn_predict_layers: 3
"""
RELAXED = """    use_relaxed_acceptance_for_thinking: true
    relaxed_topk: 10
    relaxed_delta: 0.6
"""
ASCEND = '{"num_speculative_tokens": 1, "method": "deepseek_mtp"}'
PRINTED = ' {"method": "mtp", "num_speculative_tokens": 1, "disable_padded_drafter_batch": False} '
PER_REQUEST = "note: acceptance is chosen per request: repeat it to `mtpbuild run`\n"


def run(folder: Path, *flags: object) -> tuple[int, list[str], str]:
    """Run `run`; return exit code, lines on standard error, standard output.

    The line that says what drafts is left out.
    """
    prompt = ("--prompt-ids", "5,6", "--max-tokens", 3, "--json")
    code, out, err = invoke("run", "--engine", folder, *prompt, *flags)
    return code, [line for line in err.splitlines() if not line.startswith("drafts: ")], out


def refused(*args: object) -> str:
    """Return the one line of a usage error."""
    code, out, err = invoke(*args)
    assert (code, out) == (2, "")
    assert re.fullmatch("error: .*\n", err)
    return err


@pytest.fixture
def built() -> Iterator[list[BuildRequest]]:
    with noted() as seen:
        yield seen


@pytest.fixture
def blog(tmp_path: Path) -> Path:
    (tmp_path / "blog.yaml").write_text(BLOG, encoding="utf-8")
    (tmp_path / "relaxed.yaml").write_text(BLOG + RELAXED, encoding="utf-8")
    return tmp_path / "blog.yaml"


def test_the_blog_on_build_and_run(blog: Path, built: list[BuildRequest], engine_dir: Path) -> None:
    output = f"note: --config {blog}:"
    notes = [f"{output} {key}: no effect" for key in ("use_cuda_graph", "moe_backend")]
    for flag in ("--config", "--extra_llm_api_options", "--extra-llm-api-options"):
        code, _, err = invoke("build", "--model", "x", flag, blog)
        assert (code, err.splitlines()) == (0, notes)
        code, lines, out = run(engine_dir, flag, blog)
        assert (code, lines) == (0, notes)
        assert f'"token_ids": {continuation([5, 6], 3)}' in out
    assert built == [BuildRequest("x", nextn=(3,))] * 3


@pytest.fixture
def asked(engine_dir: Path) -> Iterator[list[StepControls]]:
    """Collect what the engine's programs are told of each request."""
    seen = list[StepControls]()

    class Recording(FakePrograms):
        def begin(
            self, slot: int, length: int, newest: int, controls: StepControls = GREEDY
        ) -> None:
            seen.append(controls)
            super().begin(slot, length, newest, controls)

    with programs_by(Recording):
        yield seen


def test_the_blog_s_second_file(
    blog: Path, built: list[BuildRequest], engine_dir: Path, asked: list[StepControls]
) -> None:
    relaxed = blog.with_name("relaxed.yaml")
    code, _, err = invoke("build", "--model", "x", "--config", relaxed)
    assert (code, err.endswith(PER_REQUEST), built) == (0, True, [BuildRequest("x", nextn=(3,))])
    assert run(engine_dir, "--config", relaxed)[0] == 0
    assert (asked[0].relaxed_topk, asked[0].relaxed_delta) == (10, 0.6)
    assert asked[0].thinking_ids == THINKING


@pytest.mark.parametrize(
    "flags",
    [
        "--spec_decode_algo MTP --spec_decode_nextn 3",
        "--spec_decode_algo MTP --spec_decode_max_draft_len 3",
        "--spec-decode-algo mtp --spec-decode-nextn 3",
        "--spec-decode-max-draft-len 3",
        """--speculative-config {"method":"mtp","num_speculative_tokens":3}""",
        """--speculative_config {"num_speculative_tokens":3}""",
    ],
)
def test_flags_on_build_and_run(flags: str, built: list[BuildRequest], engine_dir: Path) -> None:
    code, _, err = invoke("build", "--model", "x", *flags.split())
    assert (code, err, built) == (0, "", [BuildRequest("x", nextn=(3,))])
    assert run(engine_dir, *flags.split())[:2] == (0, [])


@pytest.mark.parametrize(
    ("flags", "delta"),
    [("--use_relaxed_acceptance_for_thinking --relaxed_topk 10 --relaxed_delta 0.6", 0.6),
     ("--use-relaxed-acceptance-for-thinking --relaxed-topk 10 --relaxed-delta 0.6", 0.6),
     ("--relaxed-topk 10", 0.0)],
)  # fmt: skip
def test_relaxed_flags_of_run(
    flags: str, delta: float, engine_dir: Path, asked: list[StepControls]
) -> None:
    assert run(engine_dir, *flags.split())[:2] == (0, [])
    assert (asked[0].relaxed_topk, asked[0].relaxed_delta) == (10, delta)


def test_relaxed_with_sampling(engine_dir: Path) -> None:
    args = ("run", "--engine", engine_dir, "--prompt", "a", "--relaxed-topk", 3)
    assert "relaxed acceptance is for greedy requests" in refused(*args, "--temperature", 0.6)


def test_sampling_flags(engine_dir: Path, asked: list[StepControls]) -> None:
    flags = "--temperature 0.6 --top_p 0.95 --top-k 5 --min-p 0.1 --seed 4 --acceptance rejection"
    assert run(engine_dir, *flags.split())[:2] == (0, [])
    warm, real = asked  # `run` warms up with a request of the same settings
    drawn: Any = {"temperature": 0.6, "top_p": 0.95, "top_k": 5, "min_p": 0.1, "seed": 4}
    assert warm == real == StepControls(**drawn, rejection=True, thinking_ids=THINKING)


def test_acceptance_and_configuration_contradict(engine_dir: Path) -> None:
    config = '{"method": "mtp", "rejection_sample_method": "standard"}'
    args = ("run", "--engine", engine_dir, "--prompt", "a", "--speculative-config", config)
    assert refused(*args, "--acceptance", "strict") == (
        "error: --acceptance strict contradicts the configuration's rejection_sample_method\n"
    )


def test_relaxed_flags_that_ask_for_nothing(engine_dir: Path) -> None:
    line = "no effect without use_relaxed_acceptance_for_thinking"
    code, lines, _ = run(engine_dir, "--relaxed-topk", 1, "--relaxed-delta", 0.6)
    assert (code, lines) == (0, [f"note: relaxed_topk: {line}", f"note: relaxed_delta: {line}"])


def test_vllm_ascend(built: list[BuildRequest], engine_dir: Path) -> None:
    note = "note: --speculative-config: method 'deepseek_mtp' is deprecated: write 'mtp'\n"
    code, _, err = invoke("build", "--model", "x", "--speculative-config", ASCEND)
    assert (code, err) == (0, note)
    assert built == [BuildRequest("x", nextn=(1,))]
    write_engine(engine_dir.with_name("n1"), fake_manifest(nextn=1))
    assert run(engine_dir.with_name("n1"), "--speculative-config", ASCEND)[:2] == (0, [note[:-1]])
    assert run(engine_dir, "--speculative-config", ASCEND) == (
        2,
        [note[:-1],
         "error: the configuration asks for nextn 1, the engine was built with nextn 3: leave "
         "it out, or build an engine with --nextn 1"],
        "",
    )  # fmt: skip


def test_vllm_ascend_as_printed(built: list[BuildRequest]) -> None:
    assert refused("build", "--model", "x", "--speculative_config", PRINTED) == (
        f"error: --speculative-config: not JSON at character {PRINTED.index('False') + 1}, "
        "'False} ': JSON writes false, not False\n"
    )
    right = PRINTED.replace("F", "f")
    code, _, err = invoke("build", "--model", "x", "--speculative_config", right)
    assert (code, built) == (0, [BuildRequest("x", nextn=(1,))])
    assert err == "note: --speculative-config: disable_padded_drafter_batch: no effect\n"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--nextn 2 --config blog.yaml", "nextn: --nextn says 2, --config blog.yaml says 3"),
        ("--nextn 0,3 --config blog.yaml", "nextn: --nextn says 0,3, --config blog.yaml says 3"),
        ("--nextn 2 --spec-decode-nextn 3", "nextn: --nextn says 2, --spec-decode-nextn says 3"),
        ("--spec-decode-nextn 2 --spec-decode-max-draft-len 3",
         "nextn: --spec-decode-nextn says 2, --spec-decode-max-draft-len says 3"),
        ('--config blog.yaml --speculative-config {"num_speculative_tokens":2}',
         "nextn: --speculative-config says 2, --config blog.yaml says 3"),
        ("--drafter mtp-eagle --config vanilla.yaml",
         "drafter: --drafter says mtp-eagle, --config vanilla.yaml says mtp-vanilla"),
    ],
)  # fmt: skip
def test_contradictions(flags: str, line: str, blog: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(blog.parent)
    vanilla = BLOG + "    use_mtp_vanilla: true\n"
    Path("vanilla.yaml").write_text(vanilla, encoding="utf-8")
    assert refused("build", "--model", "x", *flags.split()) == f"error: {line}; drop one\n"


def test_agreement(blog: Path, built: list[BuildRequest]) -> None:
    vanilla = blog.with_name("vanilla.yaml")
    vanilla.write_text(BLOG + "    use_mtp_vanilla: true\n", encoding="utf-8")
    flags = ("--nextn", "3,3", "--spec-decode-nextn", 3, "--drafter", "mtp-vanilla")
    assert invoke("build", "--model", "x", "--config", vanilla, *flags)[0] == 0
    assert invoke("build", "--model", "x", "--nextn", "0,3", "--config", blog)[0] == 2
    assert built == [BuildRequest("x", nextn=(3, 3), drafter="mtp-vanilla")]


SPLIT = """tensor_parallel_size: 8
moe_expert_parallel_size: 4
enable_attention_dp: true
"""


@pytest.mark.parametrize("flags", ["", "--tp 8", "--ep 4 --tp 8 --attention-dp"])
def test_ranks_of_a_file(flags: str, tmp_path: Path, built: list[BuildRequest]) -> None:
    (tmp_path / "split.yaml").write_text(SPLIT, encoding="utf-8")
    config = ("--config", tmp_path / "split.yaml")
    code, _, err = invoke("build", "--model", "x", *config, *flags.split())
    assert (code, err) == (0, "")
    assert built == [BuildRequest("x", ranks=Ranks(8, 4, True))]
    says = refused("bench", "--model", "x", *config)
    assert says == "error: bench builds engines of one rank: leave the parallel sizes out\n"


@pytest.mark.parametrize(
    ("flags", "text", "line"),
    [
        ("--tp 4", SPLIT, "tp: --tp says 4, --config split.yaml says 8; drop one"),
        ("--tp 1", SPLIT, "tp: --tp says 1, --config split.yaml says 8; drop one"),
        ("--ep 2", SPLIT, "ep: --ep says 2, --config split.yaml says 4; drop one"),
        ("--tp 2 --attention-dp", "enable_attention_dp: false",
         "attention_dp: --attention-dp says true, --config split.yaml says false; drop one"),
        ("--tp 8 --ep 2", "moe_tensor_parallel_size: 2",
         "moe_tensor_parallel_size 2 times --ep 2 must be --tp, which is 8"),
    ],
)  # fmt: skip
def test_ranks_that_contradict(
    flags: str, text: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("split.yaml").write_text(text, encoding="utf-8")
    args = ("build", "--model", "x", "--config", "split.yaml", *flags.split())
    assert refused(*args) == f"error: {line}\n"


def test_an_engines_ranks_are_fixed(engine_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "split.yaml").write_text(SPLIT, encoding="utf-8")
    code, lines, _ = run(engine_dir, "--config", tmp_path / "split.yaml")
    says = "the configuration asks for tp 8, the engine was built with tp 1: leave it out, or"
    assert (code, lines) == (2, [f"error: {says} build another engine"])


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--spec-decode-nextn 16", "--spec-decode-nextn must be a whole number in 0..15, not 16"),
        ("--spec-decode-max-draft-len -1",
         "--spec-decode-max-draft-len must be a whole number in 0..15, not -1"),
        ("--spec-decode-algo EAGLE3",
         "--spec-decode-algo: 'EAGLE3' is not supported by mtpbuild; supported: MTP"),
        ("--spec-decode-algo MPT",
         "--spec-decode-algo: unknown method 'MPT', known: MTP, AUTO, DFlash, Draft_Target, "
         "Eagle, Eagle3, Lookahead, Medusa, NGram, PARD, SA, SaveState, User_Provided"),
    ],
)  # fmt: skip
def test_bad_flags(flags: str, line: str, engine_dir: Path) -> None:
    assert refused("build", "--model", "x", *flags.split()) == f"error: {line}\n"
    args = ("run", "--engine", engine_dir, "--prompt", "a")
    assert refused(*args, *flags.split()) == f"error: {line}\n"


@pytest.mark.parametrize(
    ("flags", "line"),
    [("--relaxed-topk 0", "--relaxed-topk must be a whole number from 1, not 0"),
     ("--relaxed-delta 2", "--relaxed-delta must be a number in 0..1, not 2.0")],
)  # fmt: skip
def test_bad_relaxed_flags(flags: str, line: str, engine_dir: Path) -> None:
    args = ("run", "--engine", engine_dir, "--prompt", "a")
    assert refused(*args, *flags.split()) == f"error: {line}\n"


def test_underscores_in_every_flag(built: list[BuildRequest]) -> None:
    assert invoke("build", "--model", "a_b", "--max_seq_len=99", "--spec_decode_nextn=2")[0] == 0
    assert built == [BuildRequest("a_b", nextn=(2,), max_seq_len=99)]
