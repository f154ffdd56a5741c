"""`mtpbuild run` and `mtpbuild inspect` on a synthetic engine."""

import contextlib
import json
import re
import signal
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result as CliResult

from mtpbuild.builder.compiler.prefixes import read_beginning
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.cli import terminal
from mtpbuild.runtime.configuration.input_file import read_requests
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.contract.programs import Bools, StepOutput
from mtpbuild.runtime.sampling.params import SETTINGS, list_http_settings
from tests.support.engines import write_engine, write_manifest
from tests.support.fakes import FakePrograms, continuation, fake_engine, fake_manifest
from tests.support.invoke import invoke
from tests.support.registry import programs_by
from tests.support.run_command import CTRL_C, Terminal, call, type_in


def assert_fails(result: CliResult, code: int, message: str) -> None:
    """One line on standard error, nothing on standard output, no traceback."""
    assert result.exit_code == code, result.output
    assert re.fullmatch(rf"error: .*{message}.*\n", result.stderr), result.stderr
    assert result.stdout == ""


def test_json(engine_dir: Path) -> None:
    result = call("run", "--engine", engine_dir, "--prompt-ids", "5,6", "--max-tokens", 9, "--json")
    assert result.exit_code == 0
    [line] = result.stdout.splitlines()
    answer = json.loads(line)
    assert list(answer) == ["task_id", "text", "token_ids", "finish_reason", "metrics"]
    assert answer["token_ids"] == continuation([5, 6], 9)
    assert (answer["task_id"], answer["finish_reason"]) == (0, "length")
    metrics = answer["metrics"]
    drafting = metrics.pop("speculative_decoding")
    names = "prompt_tokens output_tokens ttft_s tpot_s tokens_per_s cached_tokens queue_s"
    assert list(metrics) == [*names.split(), "forced_tokens"]
    assert drafting == {
        "mean_acceptance_length": 3.0, "draft_acceptance_rate": 1.0,
        "per_position_acceptance_rates": [2 / 3] * 3, "acceptance_histogram": [1, 0, 0, 2],
        "num_spec_steps": 3, "num_accepted_draft_tokens": 6, "num_draft_tokens": 6,
        "num_spec_tokens": 3,
    }  # fmt: skip


def test_logprobs(engine_dir: Path) -> None:
    args = ("run", "--engine", engine_dir, "--prompt-ids", "5,6", "--max-tokens", 3, "--json")
    answer = json.loads(call(*args, "--logprobs", 2).stdout)
    assert answer["logprobs"] == [
        {"token_id": token, "logprob": 0.0, "top": [[token, 0.0], [token + 1, -1.0]], "rank": 0}
        for token in answer["token_ids"]
    ]
    assert [entry["top"] for entry in json.loads(call(*args, "--logprobs", 0).stdout)["logprobs"]]


def test_synthetic_acceptance_is_labelled(engine_dir: Path) -> None:
    args = ("run", "--engine", engine_dir, "--prompt-ids", "5,6", "--max-tokens", 3)
    flags = "--rejection-sample-method synthetic --synthetic-acceptance-rates 1,0.5,0"
    plain = call(*args, *flags.split())
    assert plain.exit_code == 0
    assert plain.stderr.count("SYNTHETIC ACCEPTANCE") == 2  # a warning first, and in the summary
    answer = json.loads(call(*args, *flags.split(), "--json").stdout)
    assert answer["synthetic_acceptance_rates"] == [1.0, 0.5, 0.0]


def test_text_goes_to_stdout_and_the_summary_to_stderr(engine_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "p").write_text("hello", encoding="utf-8")
    with Engine.load(engine_dir) as engine:
        text = engine.generate("hello", SamplingParams(max_tokens=9)).text
        asked = engine.chat_prompt([{"role": "user", "content": "hello"}])
        chat = engine.generate(asked, SamplingParams(max_tokens=9)).text
    for flags, wanted in (
        (["--prompt", "hello"], text),
        (["--prompt-file", tmp_path / "p"], text),
        (["--chat", "hello"], chat),
    ):
        result = call("run", "--engine", engine_dir, "--max-tokens", 9, *flags)
        assert result.exit_code == 0
        assert result.stdout_bytes == (wanted + "\n").encode()
        assert re.fullmatch(
            r"drafts: 3 a step, by mtp-eagle\n"
            r"9 tokens \(length\), [\d.]+ tokens/s, first token \d+ ms, "
            r"acceptance length 3\.00, per position 0\.67 0\.67 0\.67\n",
            result.stderr,
        )


def test_rejection_without_sampling_is_said_to_change_nothing(engine_dir: Path) -> None:
    run = ("run", "--engine", engine_dir, "--prompt", "a", "--max-tokens", 3)
    plain, asked = call(*run), call(*run, "--acceptance", "rejection")
    assert asked.stdout == plain.stdout
    assert asked.stderr.startswith("note: at temperature 0 rejection acceptance is the same as")
    assert "note" not in call(*run, "--acceptance", "rejection", "--temperature", 1).stderr


def test_input_file(engine_dir: Path, tmp_path: Path) -> None:
    lines = [
        {"prompt": "hello", "task_id": "a"},
        {"input_ids": [5, 6], "output_tokens": 4},
        {
            "messages": [{"role": "user", "content": "hi"}], "seed": 3, "stop": "zzz",
            "max_tokens": 5,
        },
    ]  # fmt: skip
    path = tmp_path / "in.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    result = call("run", "--engine", engine_dir, "--input", path, "--max-tokens", 6, "--json")
    assert result.exit_code == 0, result.output
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["task_id"] for answer in answers] == ["a", 1, 2]
    assert [len(answer["token_ids"]) for answer in answers] == [6, 4, 5]
    assert answers[1]["token_ids"] == continuation([5, 6], 4)
    plain = call("run", "--engine", engine_dir, "--input", path, "--max-tokens", 6)
    assert plain.stdout == "".join(answer["text"] + "\n" for answer in answers)
    words = [line.split()[0] for line in plain.stderr.splitlines()]
    assert words == ["drafts:", "[a]", "[1]", "[2]"]


def test_a_line_has_its_own_penalties(engine_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    line = {"prompt": "a", "presence_penalty": 1, "logit_bias": {"7": -2.5}}
    path.write_text(json.dumps(line), encoding="utf-8")
    with Engine.load(engine_dir) as engine:
        (request,) = read_requests(path, engine, SamplingParams(repetition_penalty=1.5))
    own: dict[str, Any] = {"presence_penalty": 1, "logit_bias": {7: -2.5}}
    assert request.params == SamplingParams(**own, repetition_penalty=1.5)


def test_a_line_sets_what_a_request_can(engine_dir: Path, tmp_path: Path) -> None:
    """Each setting of HTTP bodies is a key of a line, and stands above the command's flag."""
    line: dict[str, Any] = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "relaxed_topk": 1,
        "relaxed_delta": 0.5, "presence_penalty": 1.0, "frequency_penalty": -1.0,
        "repetition_penalty": 1.5, "min_tokens": 2, "stop": ["x", "y"],
        "include_stop_str_in_output": True, "stop_token_ids": [3, 4], "ignore_eos": True,
        "logit_bias": {"7": -2.5}, "allowed_token_ids": [5, 6], "bad_words": ["z"],
        "seed": 2**64 - 1, "acceptance": "rejection", "rejection_sample_method": "block",
        "draft_sample_method": "greedy", "prompt_logprobs": 3, "cache_salt": "me",
        "timeout": 60.0,
    }  # fmt: skip
    builtin = {name for name in list_http_settings() if name in SETTINGS}
    assert line.keys() == builtin
    together = {"ignore_eos", "min_tokens", "allowed_token_ids", "bad_words"}
    rest = {name: value for name, value in line.items() if name not in together}
    lines = [rest, *({name: line[name]} for name in sorted(together)), {}]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "a"} | each) for each in lines), "utf-8")
    flags = SamplingParams(temperature=2, top_k=9, seed=1, stop=["flag"])
    with Engine.load(engine_dir) as engine:
        whole, *alone, plain = (each.params for each in read_requests(path, engine, flags))
    assert whole == SamplingParams(**rest | {"logit_bias": {7: -2.5}})
    for name, params in zip(sorted(together), alone, strict=True):
        assert params == replace(flags, **{name: line[name]})
    assert plain == flags


def batch(url: str, body: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": f"/v1/{url}", "body": body} | others


def test_a_line_has_the_names_of_openai(engine_dir: Path, tmp_path: Path) -> None:
    """`model`, and the lines of batch files; settings stay the command's where they say nothing."""
    chat = [{"role": "user", "content": "hi"}]
    idle = {"n": 1, "stream": False, "logprobs": False, "tool_choice": "auto", "stop": None}
    shaped = {"model": "m", "max_completion_tokens": 3, "max_tokens": None, "seed": -1}
    lines = [
        {"prompt": "hello"} | shaped,
        batch("completions", {"prompt": "hello"} | shaped | idle),
        batch("completions", {"prompt": [5, 6], "max_tokens": 3}, custom_id="b"),
        batch("chat/completions", {"messages": chat, "tools": [{"type": "function"}]} | shaped),
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    flags = SamplingParams(9, temperature=0.5, stop=["flag"], seed=7)
    with Engine.load(engine_dir) as engine:
        plain, *batched = read_requests(path, engine, flags)
        prompts = [engine.token_ids("hello"), [5, 6], engine.chat_ids(chat)]
    assert plain.token_ids == prompts[0]
    assert [request.token_ids for request in batched] == prompts
    assert [request.task_id for request in (plain, *batched)] == [0, "a", "b", "a"]
    seeds = [request.params for request in (plain, *batched)]
    assert seeds == [replace(flags, max_tokens=3, seed=seed) for seed in (-1, -1, 7, -1)]


TEXT_PART = {"type": "text", "text": "t"}
SHOW = "{{ [messages, tools, documents, add_generation_prompt, enable_thinking] | tojson }}"


def test_a_line_says_how_its_conversation_is_put(engine_dir: Path, tmp_path: Path) -> None:
    """Messages go to the template with all their fields, and with tools and template arguments."""
    (engine_dir / "chat_template.jinja").write_text(SHOW, encoding="utf-8")
    write_manifest(engine_dir, fake_manifest(max_seq_len=999))
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "name": "f", "content": [TEXT_PART]},
    ]
    tools, documents = [{"type": "function", "function": {"name": "f"}}], [{"text": "t"}]
    asked = {"tools": tools, "documents": documents, "add_generation_prompt": False}
    line = {"messages": messages, **asked, "chat_template_kwargs": {"enable_thinking": False}}
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(line), encoding="utf-8")
    with Engine.load(engine_dir) as engine:
        (request,) = read_requests(path, engine, SamplingParams(max_tokens=1))
        assert engine.tokenizer is not None
        text = b"".join(map(engine.tokenizer.decode_token, request.token_ids)).decode()
    got = json.loads(text)
    shown = {"content": "", "thinking": "r"}, {"content": "t"}
    assert got[0] == [message | more for message, more in zip(messages, shown, strict=True)]
    assert got[1:] == [tools, documents, False, False]


def test_chat_template_kwargs(engine_dir: Path) -> None:
    """One question or a conversation; the fake engine's answer depends on the whole prompt."""
    kwargs = {"enable_thinking": False}
    (engine_dir / "chat_template.jinja").write_text(
        "{{ messages[0].content }} {{ enable_thinking | default('unset') }}", encoding="utf-8"
    )
    write_manifest(engine_dir, read_manifest(engine_dir))
    with Engine.load(engine_dir) as engine:
        ids = engine.chat_ids([{"role": "user", "content": "hi"}], chat_template_kwargs=kwargs)
        assert engine.chat_prompt([{"role": "user", "content": "hi"}]) == "hi unset"
        wanted = engine.generate(ids, SamplingParams(max_tokens=9)).text
    flags = ("--max-tokens", 9, "--chat-template-kwargs", json.dumps(kwargs))
    once = call("run", "--engine", engine_dir, "--chat", "hi", *flags)
    assert once.stdout_bytes == (wanted + "\n").encode()
    talk = type_in(["hi"], "run", "--engine", engine_dir, "--temperature", 0, *flags)
    assert talk.exit_code == 0, talk.output
    assert wanted in talk.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"in\.jsonl:2: not JSON"),
        ("[" * 100_000, r"in\.jsonl:2: not JSON"),
        ("[]", r"in\.jsonl:2: "),
        ("{}", r"in\.jsonl:2: give one of prompt, input_ids and messages"),
        ('{"prompt": "a", "input_ids": [1]}', r"in\.jsonl:2: give one of"),
        ('{"prompt": ""}', r"in\.jsonl:2: the prompt is empty"),
        ('{"prompt": 5}', r"in\.jsonl:2: prompt: "),
        ('{"input_ids": [999]}', r"in\.jsonl:2: token id 999 is outside"),
        ('{"input_ids": [5], "output_tokens": 0}', r"in\.jsonl:2: max_tokens"),
        ('{"input_ids": [5], "presence_penalty": 3}', r"in\.jsonl:2: presence_penalty must be"),
        ('{"input_ids": [5], "logit_bias": {"x": 3}}', r"in\.jsonl:2: logit_bias must map"),
        ('{"prompt": "a", "max_tokens": 5, "output_tokens": 5}',
         r":2: output_tokens and max_tokens"),
        ('{"prompt": "a", "max_completion_tokens": 5, "max_tokens": 5}',
         r":2: max_tokens and max_completion_tokens are the same: give one"),
        ('{"prompt": "a", "model": 5}', r":2: model: "),
        ('{"prompt": "a", "stop_token_ids": [320]}',
         r":2: stop_token_ids: token id 320 is outside"),
        ('{"prompt": "a", "repetition_penalty": 2}', r":2: repetition_penalty is not supported by"),
        *(
            (json.dumps(line), rf":2: {says}") for line, says in (
                ({"custom_id": "a", "prompt": "x"}, "body: missing; a line of a batch has "),
                (batch("completions", {"prompt": "a"}, max_tokens=5),
                 "max_tokens: unknown; a line"),
                (batch("embeddings", {"input": "a"}), ".* is a POST to .*, not 'POST' '/v1/embed"),
                (batch("completions", {"prompt": "a"}, method="GET"), ".* is a POST to "),
                (batch("completions", {"messages": []}), "body: /v1/completions has prompt"),
                (batch("completions", {"prompt": ["a"]}), "input_ids: "),
                (batch("completions", {"prompt": "a", "logprobs": 0}), "logprobs: "),
                (batch("completions", {"prompt": "a", "n": 2}), "n: "),
                (batch("completions", {"prompt": "a", "top_k": 2**64}), "top_k must be a whole"),
                (batch("completions", {"prompt": "a"}, custom_id=[]), "task_id"),
            )
        ),
        ('{"prompt": "a", "stop": [""]}', r"in\.jsonl:2: stop"),
        ('{"prompt": "a", "temprature": 1}', r"in\.jsonl:2: temprature"),
        ('{"messages": [{"role": "x", "content": "y"}]}', r"in\.jsonl:2: .*no role x"),
        ('{"prompt": "\\ud800"}', r"in\.jsonl:2: .*not valid Unicode"),
        ('{"prompt": "a", "tools": []}', r"in\.jsonl:2: tools goes with messages"),
        ('{"messages": [], "tools": []}', r"in\.jsonl:2: messages is empty"),
        ('{"messages": [{"role": "user", "content": ""}], "tools": [5]}', r":2: tools 0 is not a"),
        ('{"messages": [{"role": "user"}]}', r":2: messages\.0\.content is missing: give a text"),
        ('{"messages": [{"role": "u", "content": ""}], "chat_template_kwargs": {"messages": []}}',
         r"in\.jsonl:2: chat_template_kwargs can't have messages"),
        ('{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": []}',
         r"in\.jsonl:2: chat_template_kwargs: "),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_before_anything_runs(
    engine_dir: Path, tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n", encoding="utf-8")
    assert_fails(call("run", "--engine", engine_dir, "--input", path, "--json"), 2, message)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ([], 2, "standard input: the question is empty; or give one of --prompt, "),
        (["--json"], 2, "standard input: the question is empty"),
        (["--prompt-file", "-"], 2, "the prompt is empty"),
        (["--prompt", "a", "--chat", "b"], 2, "give one of .*, not 2"),
        (["--prompt", ""], 2, "the prompt is empty"),
        (["--chat", ""], 2, "--chat: the question is empty"),
        (["--prompt", "a", "--system", "s"], 2, "--system goes with --chat"),
        (["--input", "a", "--system", "s"], 2, "a line of --input has its own messages"),
        (["--chat", "a", "--chat-template-kwargs", "{"], 2, "--chat-template-kwargs is not JSON"),
        (["--chat", "a", "--chat-template-kwargs", "5"], 2, "is an object such as"),
        (["--chat", "a", "--chat-template-kwargs", '{"tools": []}'], 2, "can't have tools"),
        (["--prompt", "a", "--chat-template-kwargs", "{}"], 2, "goes with --chat"),
        (["--input", "a", "--chat-template-kwargs", "{}"], 2, "a line of --input has its own"),
        (["--prompt-ids", ""], 2, "the prompt is empty"),
        (["--prompt-ids", "5,x"], 2, "such as 5,7,9"),
        (["--prompt-ids", "5,320"], 2, "token id 320 is outside the vocabulary"),
        (["--prompt-ids", ",".join(["5"] * 70)], 2, "70 tokens, this engine takes at most 63"),
        (["--prompt-file", "/nothing"], 2, "can't be read"),
        (["--input", "/nothing"], 2, "can't be read"),
        (["--input", "/dev/null"], 2, "no requests"),
        (["--prompt", "a", "--max-tokens", "0"], 2, "max_tokens"),
        (["--prompt", "a", "--max-tokens", "3", "--min-tokens", "4"], 2, "min_tokens must be 0"),
        (["--prompt", "a", "--stop", ""], 2, "stop"),
        (["--prompt", "a", "--threads", "0"], 2, "threads"),
        (["--prompt", "a", "--logprobs", "2"], 2, "add --json"),
        (["--prompt", "a", "--presence-penalty", "3"], 2, "presence_penalty must be a number in"),
        (["--prompt", "a", "--logit-bias", "5"], 2, "--logit-bias '5' is no JSON object"),
        (["--prompt", "a", "--repetition-penalty", "1.1"], 2, "not supported by this engine"),
        (["--prompt", "a", "--json", "--logprobs", "21"], 2,
         "logprobs must be a whole number in 0..20"),
        (["--prompt", "a", "--rejection-sample-method", "exact"], 2,
         "rejection_sample_method must be one of standard, block, synthetic"),
        (["--prompt", "a", "--rejection-sample-method", "synthetic"], 2,
         "needs exactly one of synthetic_acceptance_rates and synthetic_acceptance_length"),
        (["--prompt", "a", "--acceptance", "strict", "--rejection-sample-method", "block"], 2,
         'block needs acceptance "rejection"'),
        (["--prompt", "a", "--synthetic-acceptance-length", "2"], 2,
         "needs rejection_sample_method"),
        (["--prompt", "a", "--synthetic-acceptance-rates", "x"], 2, "not a list of numbers"),
    ],
)  # fmt: skip
def test_usage_errors(engine_dir: Path, flags: list[str], code: int, message: str) -> None:
    assert_fails(call("run", "--engine", engine_dir, *flags), code, message)


def test_engine_errors(engine_dir: Path, tmp_path: Path) -> None:
    assert_fails(call("run", "--engine", tmp_path / "no", "--prompt", "a"), 1, "no such engine")
    assert_fails(call("inspect", tmp_path / "no"), 1, "no such engine")
    (engine_dir / "decode.onnx").write_bytes(b"")
    says = "copy it again or rebuild the engine"
    assert_fails(call("run", "--engine", engine_dir, "--prompt", "a"), 1, says)
    assert_fails(call("inspect", engine_dir), 1, says)


def test_a_prompts_file_is_taken_byte_by_byte(engine_dir: Path, tmp_path: Path) -> None:
    """The fake engine's answer depends on the whole prompt."""
    run = ("run", "--engine", engine_dir, "--max-tokens", 9)
    texts = ("a\r\nb", "a\nb", "a\rb", "\ufeffa\u2028\x0b", "a\r\n", "a ")
    for text in texts:
        (tmp_path / "prompt").write_bytes(text.encode())
        piped = call(*run, "--prompt-file", "-", input=text.encode()).stdout
        assert call(*run, "--prompt-file", tmp_path / "prompt").stdout == piped, repr(text)
        assert call(*run, "--prompt", text).stdout == piped, repr(text)
        assert read_beginning(tmp_path / "prompt", messages=False).text == text


@pytest.mark.parametrize("flags", [["--prompt", "a"], ["--input", "in.jsonl"]])
def test_ctrl_c(engine_dir: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    class Interrupted(FakePrograms):
        def step(self, active: Bools, rows: int) -> StepOutput:
            self.fail = KeyboardInterrupt() if self.steps else None  # the first one warms up
            return super().step(active, rows)

    monkeypatch.chdir(engine_dir.parent)
    Path("in.jsonl").write_text('{"prompt": "a"}\n' * 5, encoding="utf-8")
    with programs_by(Interrupted):
        result = call("run", "--engine", engine_dir, *flags)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "interrupted"


def test_an_engine_without_tokenizer_prints_ids(tmp_path: Path, fake_target: None) -> None:
    folder = tmp_path / "ids_n0"
    write_engine(folder, fake_manifest(nextn=0), tokenizer=False)
    result = call("run", "--engine", folder, "--prompt-ids", "5,6", "--max-tokens", 3)
    assert result.stdout.split() == [str(id) for id in continuation([5, 6], 3)]
    assert_fails(call("run", "--engine", folder, "--prompt", "a"), 2, "without a tokenizer")
    assert_fails(call("run", "--engine", folder, "--chat", "a"), 2, "without a tokenizer")


def test_inspect(engine_dir: Path) -> None:
    result = call("inspect", engine_dir)
    assert result.exit_code == 0
    for fact in ("DeepseekV3ForCausalLM", "mtp-eagle", "1 slots of 64 tokens", "decode.onnx"):
        assert fact in result.stdout
    assert "0.0 MB of memory for its slots, and its weights" in " ".join(result.stdout.split())
    raw = json.loads(call("inspect", engine_dir, "--json").stdout)
    assert raw == read_manifest(engine_dir).model_dump(mode="json")


@pytest.mark.parametrize(
    ("variables", "colour"),
    [({"TERM": "xterm"}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_accepted_drafts_stand_out(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], colour: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    screen = Terminal()
    engine, _ = fake_engine()
    with contextlib.redirect_stdout(screen):
        result = terminal.stream_answer(engine, "hello", SamplingParams(max_tokens=9))
    text = screen.getvalue()
    assert (terminal.GREEN in text) == colour
    plain = re.sub(r"\x1b\[\d+m", "", text)
    assert plain == ("hello" if colour else "") + result.text + "\n"


def test_a_terminal_is_asked_for_prompts(engine_dir: Path) -> None:
    lines = ["", "hello", "and " * 60, f"{CTRL_C}again"]
    result = type_in(lines, "run", "--engine", engine_dir, "--max-tokens", 4)
    assert result.exit_code == 0
    printed = result.stderr
    assert printed.count("4 tokens (length)") == 2
    assert "this engine takes at most 63" in printed


def test_a_chat_samples_as_the_server_and_ends_where_the_model_ends(engine_dir: Path) -> None:
    """Flags stand above generation_config.json; other ways of `run` are greedy, as before."""
    (engine_dir / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 7}')
    write_manifest(engine_dir, read_manifest(engine_dir))
    run = ("run", "--engine", engine_dir)
    assert "max_tokens 64; temperature 0.6; top_k 7\n" in type_in(["/set"], *run).stderr
    flags = ("--temperature", 0, "--max-tokens", 9)
    assert "max_tokens 9; top_k 7\n" in type_in(["/set"], *run, *flags).stderr
    assert "seed" not in call(*run, "--prompt", "a").stderr


def test_a_chat_without_its_package_is_refused(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "mtpbuild.runtime.cli.chat_terminal", raising=False)
    monkeypatch.delattr("mtpbuild.runtime.cli.chat_terminal", raising=False)
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    result = type_in(["hi"], "run", "--engine", engine_dir)
    assert_fails(result, 1, r"a chat in the terminal needs prompt_toolkit: pip install '.\[cpu\]'")


def test_what_is_piped_in_is_a_question_or_a_prompt(engine_dir: Path) -> None:
    """The fake engine's answer depends on the whole prompt."""
    run = ("run", "--engine", engine_dir, "--max-tokens", 9)
    for flags, typed, same in (
        ([], "hello\n", ["--chat", "hello"]),
        (["--prompt-file", "-"], "hello\n", ["--prompt", "hello\n"]),
    ):
        piped = call(*run, *flags, input=typed)
        assert (piped.exit_code, piped.stdout) == (0, call(*run, *same).stdout)
    assert call(*run, "--json", input="hello").stdout.startswith('{"task_id": 0, ')
    assert_fails(
        call(*run, "--prompt-file", "-", input=b"\xff"), 2, "--prompt-file - can't be read"
    )


def test_a_system_message_opens_every_chat(engine_dir: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    (engine_dir / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_manifest(engine_dir, read_manifest(engine_dir))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    with Engine.load(engine_dir) as engine:
        wanted = engine.generate(engine.chat_ids(messages), SamplingParams(max_tokens=3)).text
    run = ("run", "--engine", engine_dir, "--max-tokens", 3, "--system", "Be brief.")
    assert call(*run, "--chat", "hi").stdout == call(*run, input="hi").stdout == wanted + "\n"
    assert wanted in type_in(["hi"], *run, "--temperature", 0).stdout


def test_an_engine_without_a_chat_template_continues_texts(engine_dir: Path) -> None:
    (engine_dir / "chat_template.jinja").unlink()
    write_manifest(engine_dir, read_manifest(engine_dir))
    run = ("run", "--engine", engine_dir, "--max-tokens", 4)
    wanted = call(*run, "--prompt", "hi").stdout
    assert call(*run, input="hi").stdout == wanted
    assert type_in(["hi", "hi"], *run, "--temperature", 0).stdout.count(wanted.strip()) == 2
    assert_fails(call(*run, "--system", "s", input="hi"), 2, "no chat_template.jinja")


def test_ctrl_c_ends_an_answer_and_not_the_conversation(engine_dir: Path) -> None:
    class Interrupted(FakePrograms):
        def step(self, active: Bools, rows: int) -> StepOutput:
            if self.steps == 3:  # the first one warms up
                signal.raise_signal(signal.SIGINT)
            return super().step(active, rows)

    run = ("run", "--engine", engine_dir, "--max-tokens", 20)
    handler = signal.getsignal(signal.SIGINT)
    with programs_by(Interrupted):
        done = type_in(["hello", "more"], *run)
    assert (done.exit_code, signal.getsignal(signal.SIGINT)) == (0, handler)
    _, first, _, second = done.stderr.strip().splitlines()  # between them: the context is full
    assert "tokens (cancelled), " in first
    assert "tokens (length), " in second
    assert type_in([f"hello{CTRL_C}", CTRL_C], *run).stderr.count("\n") == 1  # it clears the line


def test_a_second_ctrl_c_interrupts_an_answer_that_does_not_end(engine_dir: Path) -> None:
    class Stuck(FakePrograms):
        def step(self, active: Bools, rows: int) -> StepOutput:
            for _ in range(2 * (self.steps > 1)):  # the first one warms up
                signal.raise_signal(signal.SIGINT)
            return super().step(active, rows)

    # A shell's background jobs ignore SIGINT, and so would this process.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with programs_by(Stuck):
            done = type_in(["hello"], "run", "--engine", engine_dir)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (130, "interrupted")


def test_the_version_and_a_short_help() -> None:
    assert invoke("--version") == (0, f"mtpbuild {version('mtpbuild')}\n", "")
    assert invoke("-h") == invoke("--help")
    assert invoke("run", "-h")[0] == 0
