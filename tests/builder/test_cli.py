"""The command line of the compiler: exit codes, one-line errors, frozen flags, light imports."""

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from mtpbuild.builder.cli import app
from mtpbuild.builder.cli.shared import StageLines, show_progress
from mtpbuild.builder.cli.tables import print_stages
from mtpbuild.builder.plan.recipe import load_recipes, parse_recipe
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages
from mtpbuild.runtime.checks import parse_list
from mtpbuild.runtime.errors import CheckpointError, UsageError
from tests.support.invoke import invoke, options, without_stages
from tests.support.requests import noted
from tests.support.stand_ins import importing

MAIN = [sys.executable, "-c", "from mtpbuild.builder.cli import app; app()"]
BLOCKED = """
import signal, time
from mtpbuild.builder import cli
from tests.support.fake_target import in_place_of

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it

def trace(*args):
    print("in the middle", flush=True)
    time.sleep(60)

with in_place_of("onnxruntime", trace=trace):
    cli.app()
"""


RECIPE = '\nengine = "b"\ndescription = "d"\nconfig = "c"\nlayout = "bf16"'


def mtpbuild(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MAIN, *map(str, args)], capture_output=True, text=True, check=False)


FLAGS = {
    "bench": "--acceptance --allreduce-strategy --cache-dtype --compute-capability --concurrency "
    "--config --dataset --device --drafter --dtype --extra-llm-api-options --fast-build "
    "--huge-pages --input-len --json --min-p --model --nextn --no-cuda-graphs --num-requests --out "
    "--output-len --portable --provider --rejection-sample-method --relaxed --relaxed-delta "
    "--relaxed-topk --seed --spec-decode-algo --spec-decode-max-draft-len --spec-decode-nextn "
    "--speculative-config --strip-weights --synthetic-acceptance-length "
    "--synthetic-acceptance-rates --target --temperature --threads --top-k --top-p "
    "--use-relaxed-acceptance-for-thinking",
    "build": "--acceptance-rule --allreduce-strategy --attention-dp --cache-dtype --calibrate "
    "--calibration-text --chat-template --checkpoint --compute-capability --config --device "
    "--draft-vocab --drafter --dry-run --dtype --dump --ep --exact --extra-llm-api-options "
    "--fast-build --force --head-weights --layers --max-batch --max-seq-len --model --mtp --nextn "
    "--out --portable --prefill-chunk --prefix --rank --revision --score --spec-decode-algo "
    "--spec-decode-max-draft-len --spec-decode-nextn --speculative-config --strip-weights "
    "--target --tp --weight-bits --weights",
    "diff": "--engine --json",
    "eval": "--acceptance --config --engine --extra-llm-api-options --huge-pages --json --min-p "
    "--no-cuda-graphs --num-problems --out --provider --rejection-sample-method --relaxed-delta "
    "--relaxed-topk --seed --spec-decode-algo --spec-decode-max-draft-len --spec-decode-nextn "
    "--speculative-config --synthetic-acceptance-length --synthetic-acceptance-rates --task "
    "--temperature --threads --top-k --top-p --use-relaxed-acceptance-for-thinking",
    "inspect": "--json",
    "list": "--json",
    "plan": "--acceptance --attention-dp --bandwidth --cache-dtype --checkpoint --context-len "
    "--cpu --disk-bandwidth --ep --gpu --json --max-batch --max-seq-len --measured --memory "
    "--model --nextn --picture --prefill-chunk --tp",
    "prefix add": "--chat --engine --file --messages --name --private --threads --tools",
    "prefix list": "--engine --json",
    "prefix remove": "--engine --name",
    "quantize": "--calibrate --calibration-text --checkpoint --exclude --force --head --model "
    "--mtp --out --to",
    "recipes": "--fits --json",
    "refit": "--chat-template --checkpoint --engine --mtp",
    "report": "--checkpoint --mtp --no-hashes --out --quick --threads --weights",
    "rm": "--yes",
    "run": "--acceptance --chat --chat-template --chat-template-kwargs --config --engine "
    "--extra-llm-api-options --frequency-penalty --huge-pages --ignore-eos --input --json "
    "--json-schema --logit-bias --logprobs --max-seq-len --max-tokens --min-p --min-tokens "
    "--no-cuda-graphs --presence-penalty --prompt --prompt-file --prompt-ids --provider "
    "--rejection-sample-method --relaxed-delta --relaxed-topk --repetition-penalty --seed "
    "--spec-decode-algo --spec-decode-max-draft-len --spec-decode-nextn --speculative-config "
    "--stop --synthetic-acceptance-length --synthetic-acceptance-rates --system --temperature "
    "--threads --top-k --top-p --trace --use-relaxed-acceptance-for-thinking --verify-hashes --yes",
    "serve": "--allow-origin --allowed-hosts --api-key --chat-template --chunked-prefill-size "
    "--config --drain-timeout --engine --host --huge-pages --keep --log-requests --max-body "
    "--max-queue --max-seq-len --no-access-log --no-cuda-graphs --no-prefix-cache "
    "--no-thinking-split --port --prefix-cache-bytes --prefix-cache-dir --provider "
    "--request-timeout --served-model-name --tensor-parallel-size --threads --tool-call-parser "
    "--verify-hashes",
    "study": "--json --out",
    "tune-head": "--data --draft-vocab --drafter --dtype --epochs --force --held-out --lora --lr "
    "--max-tokens --model --mtp --new --nextn --out --prompts-by-model --weights",
    "verify": "--against --engine --exact --huge-pages --json --model --no-cuda-graphs "
    "--output-len --prompts --provider --seeds --threads",
}


def test_frozen_flags() -> None:
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    names = [*commands.keys() - {"prefix"}, *(f"prefix {n}" for n in commands["prefix"].commands)]
    assert sorted(names) == [*FLAGS]
    for command, flags in FLAGS.items():
        assert " ".join(options(command)) == flags


def test_flags_become_the_request(tmp_path: Path) -> None:
    with noted() as seen:
        assert invoke("build", "--model", "x")[0] == 0
        flags = "--model x --nextn 3,0 --drafter mtp-vanilla --max-batch 2 --max-seq-len 99"
        more = f"--prefill-chunk 8 --target onnxruntime --out {tmp_path} --force"
        assert invoke("build", *flags.split(), *more.split())[0] == 0
        sizes: dict[str, Any] = {"max_batch": 2, "max_seq_len": 99, "prefill_chunk": 8}
        full = BuildRequest("x", (3, 0), "mtp-vanilla", out=tmp_path, force=True, **sizes)
        gpus = ("--compute-capability", "sm89,sm120", "--fast-build")
        assert invoke("build", "--model", "x", *gpus)[0] == 0
        wanted = BuildRequest("x", options={"compute_capability": "sm89,sm120", "fast_build": True})
        assert seen.pop() == wanted
        assert invoke("build", "--model", "deepseek-r1-fp4")[0] == 0
        assert seen.pop() == BuildRequest("deepseek-r1-fp4", target="tensorrt")
        assert seen == [BuildRequest("x"), full]


@pytest.mark.usefixtures("quick")
def test_the_report(smallest: Path, tmp_path: Path) -> None:
    flags = ("build", "--model", smallest, "--nextn", "0,1", "--out", tmp_path)
    code, out, err = invoke(*flags)
    assert (code, err) == (0, "")
    for nextn in (0, 1):
        line = next(line for line in out.splitlines() if f"small_n{nextn}" in line)
        assert str(tmp_path / f"small_n{nextn}") in line
        assert "built" in line
    assert "trace decode 0.0 s" in out
    assert "peak memory" in out
    code, out, err = invoke(*flags)
    assert (code, err) == (0, "")
    assert out.count("unchanged") == 2
    assert "trace decode" not in out


def test_stages_are_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a stage that counts, only those that come late enough behind the last line."""
    with show_progress("first") as watch:
        for stage in (
            "write weights, 1%",
            "write weights, 2%",
            "trace",
            "request 1 of 2, 4 at once",
        ):
            watch(stage)
        watch("request 2 of 2, 4 at once")
        assert isinstance(watch, StageLines)
        watch.EVERY = 0.0
        watch("request 3 of 2, 4 at once")
    stages = [line.partition("s] ")[2] for line in capsys.readouterr().err.splitlines()]
    requests = [f"request {number} of 2, 4 at once" for number in (1, 3)]
    assert stages == ["write weights, 1%", "trace", *requests]


def test_a_terminal_shows_the_stage_and_the_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with show_progress("first") as watch:
        watch("lower decode")
    shown = capsys.readouterr().err
    assert "lower decode" in shown
    assert "0:00:00" in shown


def test_recipes_as_json() -> None:
    code, out, err = invoke("recipes", "--json")
    assert (code, err) == (0, "")
    assert [recipe["name"] for recipe in json.loads(out)] == [r.name for r in load_recipes()]
    assert {"engine", "target", "repository", "download"} <= json.loads(out)[0].keys()


def test_stages_are_printed_where_no_peak_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """Windows has no module `resource`."""
    with importing({"resource": None}):
        print_stages(Stages(seconds={"package": 1.5}))
    assert capsys.readouterr().out == "package 1.5 s\n"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["build"], "Missing option '--model' (see `mtpbuild build --help`)"),
        (["build", "--model"], "Option '--model' requires an argument (see `mtpbuild"),
        (["build", "--model", "x", "--max-batch", "y"], "Invalid value for '--max-batch': "),
        (["run", "--engin", "x"], "No such option: --engin (Possible options: --engine) (see"),
        (["inspect"], "Missing argument 'engine' (see `mtpbuild inspect --help`)"),
        (["bild"], "No such command 'bild'. Did you mean 'build'? (see `mtpbuild --help`)"),
        (["--versio"], "No such option: --versio (Possible options: --version) (see `mtpbuild "),
    ],
)
def test_what_typer_refuses_is_one_line_too(args: list[str], says: str) -> None:
    code, out, err = invoke(*args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {says}")


def test_a_shell_can_complete() -> None:
    program = shlex.quote(str(Path(sys.executable).with_name("mtpbuild")))
    command = f"{program} --show-completion; exit $?"  # bash stays its parent
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, "_mtpbuild_completion" in done.stdout) == (0, True), done.stderr


def test_errors_of_the_real_command(tmp_path: Path) -> None:
    """One line on standard error, no traceback, also from a process of its own."""
    done = mtpbuild("build", "--model", "deepseek-tinny")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: 'deepseek-tinny' is neither a recipe nor")
    assert "the nearest are deepseek-tiny, " in done.stderr
    assert done.stderr.count("\n") == 1
    done = mtpbuild("build", "--model", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: {tmp_path}: no config.json; give a Hugging Face checkpoint folder\n"
    )


def test_interrupted(smallest: Path, tmp_path: Path) -> None:
    flags = ["build", "--model", str(smallest), "--nextn", "0", "--out", str(tmp_path / "engine")]
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in the middle\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    left, note = tmp_path / ".engine.building", "goes on from what is finished: weights, in"
    note = f"note: the same build of {tmp_path / 'engine'} {note} {left}"
    assert (process.returncode, out) == (130, "")
    assert without_stages(err) == f"{note}\n\ninterrupted\n"
    assert list(tmp_path.iterdir()) == [left]


def test_the_command_line_is_light() -> None:
    heavy = {"torch", "onnx", "onnxruntime", "numpy", "pydantic", "safetensors", "tokenizers"}
    heavy |= {"huggingface_hub", "httpx2"}
    code = f"import sys, mtpbuild.builder.cli; print({heavy!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_numbers() -> None:
    assert parse_list("--nextn", "0,1, 15", int, "0,1") == (0, 1, 15)
    with pytest.raises(UsageError, match="--nextn '1;2' is not a list"):
        parse_list("--nextn", "1;2", int, "0,1")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name = ", "not valid TOML"),
        ('name = "a"\nengine = "b"\nconfig = "c"\nlayout = "fp8"', "description: Field required"),
        ("name = 3" + RECIPE, "name: Input should be"),
        ('name = "a"\nlayuot = "fp8"' + RECIPE, "layuot: Extra inputs are not permitted; did you "),
        ('name = "a"\nrepository = 3' + RECIPE, "repository: Input should be a valid string"),
    ],
)
def test_bad_recipes(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        parse_recipe(tmp_path / "bad.toml")
    assert str(caught.value).startswith(f"{tmp_path / 'bad.toml'}: ")
    assert says in str(caught.value)
