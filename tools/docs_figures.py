"""Writes what commands print into README.md and docs/, and reports where a document differs.

    python tools/docs_figures.py            # rewrites the documents; a few minutes
    python tools/docs_figures.py --check    # changes nothing; exit code 1 if something would change

Two kinds of places are written. A ```console block has commands after "$ ", each followed by its
output. Between `<!-- figures: NAME -->` and `<!-- end of figures -->` is the table that the
function NAME below makes, from what commands print or from a record in benchmarks/results/.
Commands run in an empty folder that has engines/tiny_n0 and tiny_n3. Times and speeds depend on the
machine, so they are not compared.

A block after `<!-- not run: WHY -->` is left as it is. Blocks after `<!-- long: WHY -->` and the
tables in LONG are written like the others, but only `make test-full` compares them.
"""

import argparse
import contextlib
import difflib
import json
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCED = re.compile(
    r"(?:^ *<!-- (?P<mark>not run|long|file): (?P<why>[^\n]+) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
FIGURES = re.compile(
    r"(?<=<!-- figures: )(?P<name>\w+)(?P<head> -->\n)(?P<text>.*?)(?=<!-- end of figures -->)",
    re.DOTALL,
)
MEASURED = re.compile(r'[\d.,]+(?= (?:tokens/s|ms|s|MiB)\b)|(?<=_s": )[\d.e-]+')
WIDTH = "100"


@dataclass(frozen=True)
class Block:
    """A fenced block of a document.

    mark: `not run`, `long`, or none. why: the reason for the mark.
    """

    document: Path
    line: int
    language: str
    text: str
    mark: str | None
    why: str | None

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Return the block's commands without comments; continued lines are joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        found = (shlex.join(shlex.split(line, comments=True)) for line in lines)
        return [line for line in found if line]


def blocks(document: Path) -> list[Block]:
    """List a document's fenced blocks in their order."""
    text = document.read_text(encoding="utf-8")
    return [block_of(document, match) for match in FENCED.finditer(text)]


def block_of(document: Path, match: re.Match[str]) -> Block:
    line = match.string.count("\n", 0, match.start("text"))
    language, text, mark, why = match.group("language", "text", "mark", "why")
    return Block(document, line, language, textwrap.dedent(text), mark, why)


def run(command: str) -> str:
    """Run an `mtpbuild` command in this process, or a script; return all that it prints."""
    from typer.testing import CliRunner

    from mtpbuild.builder.cli import app

    name, *args = shlex.split(command)
    if name == "python":
        script = [sys.executable, str(ROOT / args[0]), *args[1:]]
        return subprocess.run(script, capture_output=True, text=True, check=True).stdout
    if name != "mtpbuild":
        raise ValueError(f"{command}: console blocks have commands of mtpbuild, and scripts")
    env = {"COLUMNS": WIDTH, "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    done = CliRunner().invoke(app, args, env=env)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return "".join(f"{line.rstrip()}\n" for line in done.output.splitlines())


def console(block: Block) -> str:
    """Return a console block with what its commands print now."""
    parts = re.split(r"(?m)^(?=\$ )", block.text)
    shown = (re.match(r"\$ (?:.*\\\n)*.*\n", part) for part in parts)
    return "".join(
        match[0] + run(command)
        for match, command in zip(filter(None, shown), block.commands, strict=True)
    )


def cpu_engines() -> str:
    """Return the table in docs/plan.md of engines of GigaChat3-10B on a CPU."""
    model = "mtpbuild plan --model gigachat3-10b-a1.8b-bf16 --cpu --nextn 0,1 --json"
    found = json.loads(run(model))
    head = ("`--weights`", "engine", "memory, nextn 1", "GB per step, nextn 0", "nextn 1")
    rows = [
        (
            f"`{engine['weights']}`",
            gigabytes(engine["engine_bytes"]),
            gigabytes(engine["memory_bytes"][1], 1),
            *(f"{reads / 1e9:.2f}" for reads in engine["bytes_per_step"]),
        )
        for engine in found["engines"]
    ]
    return table(head, rows)


def published_speeds() -> str:
    """Return the table in docs/plan.md of R1's predicted and published speeds on 8 B200."""
    from mtpbuild.lab.forecast.forecast import PUBLISHED_SPEED

    found = plan_of_r1("deepseek-r1-fp4")
    rows = [["acceptance length, published", *(f"{n:.2f}" for n in found["acceptance_lengths"])]]
    rows.append(["tokens/s, published", *(f"{speed:.0f}" for speed in PUBLISHED_SPEED)])
    predicted = found["predicted_tokens_per_s"]
    fitted = (0, 1)
    rows.append(
        [
            "tokens/s, predicted",
            *(f"({s:.0f})" if n in fitted else f"{s:.0f}" for n, s in enumerate(predicted)),
        ]
    )
    off = (one / other - 1 for one, other in zip(predicted, PUBLISHED_SPEED, strict=True))
    rows.append(
        ["difference", *("fitted" if n in fitted else f"{x:+.1%}" for n, x in enumerate(off))]
    )
    return table(("nextn", *map(str, found["nextn"])), rows)


def r1_sizes() -> str:
    """Return the table in docs/plan.md of R1 in both published formats, on 1 and 8 ranks."""
    rows = []
    for model in ("deepseek-r1", "deepseek-r1-fp4"):
        alone, eight = plan_of_r1(model, "h200", 1), plan_of_r1(model, "h200", 8)
        rows.append(
            (
                f"`{model}`",
                gigabytes(alone["checkpoint_bytes"]),
                gigabytes(alone["weights_bytes_per_rank"]),
                gigabytes(eight["weights_bytes_per_rank"]),
                f"{eight['kv_bytes_per_token_per_rank']:,}",
                f"{eight['kv_tokens_per_rank']:,}",
            )
        )
    head = ("", "checkpoint", "all weights", "a rank of 8", "bytes a token", "tokens on an H200")
    return table(head, rows)


def plan_of_r1(model: str, gpu: str = "b200", tp: int = 8) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        run(f"mtpbuild plan --model {model} --gpu {gpu} --tp {tp} --json")
    )
    return found


def long_contexts() -> str:
    """Return the table in docs/plan.md of a step's cache bytes, with chosen rows and with all."""
    contexts = (2048, 8192, 32768, 131072)

    def read(model: str, context: int) -> str:
        command = f"mtpbuild plan --model {model} --gpu h200 --tp 8 --nextn 3"
        [parts] = json.loads(run(f"{command} --context-len {context} --json"))["parts"]
        caches = sum(part["bytes"] for part in parts if part["name"].endswith("caches"))
        return f"{caches / 1e9:.2f}"

    models = ("deepseek-v3", "deepseek-v3.2", "glm-5")
    rows = [(f"`{model}`", *(read(model, context) for context in contexts)) for model in models]
    return table(("", *(f"{context:,}" for context in contexts)), rows)


def streams_bounds() -> str:
    """Return the table in docs/plan.md of DeepSeek-V4's least step times, beside published ones."""
    lengths = {
        "MTP": (1, 1.79, 2.27, 2.49, 2.54, 2.55),
        "DSpark": (1, 1.84, 2.51, 3.01, 3.36, 3.61),
    }
    rows = []
    for model, head, tp, gpu, published in (
        ("deepseek-v4-flash", "DSpark", 4, "h200", "581"),
        ("deepseek-v4-flash", "DSpark", 4, "b200", "763 (GB300)"),
        ("deepseek-v4-flash", "DSpark", 8, "h200", ""),
        ("deepseek-v4-flash-preview", "MTP", 8, "h200", ""),
        ("deepseek-v4-flash-preview", "MTP", 8, "b200", ""),
        ("deepseek-v4-pro", "MTP", 8, "b200", ""),
    ):
        accepted = ",".join(map(str, lengths[head]))
        command = f"mtpbuild plan --model {model} --gpu {gpu} --tp {tp} --nextn 0..5"
        found = json.loads(run(f"{command} --acceptance {accepted} --json"))
        step, speed = found["roofline_step_s"], found["roofline_tokens_per_s"]
        best = max(range(6), key=lambda n: speed[n])
        rows.append(
            (
                f"`{model}`, {tp} {gpu.upper()}, {head}",
                gigabytes(found["weights_bytes_per_rank"], 1),
                f"{1e3 * step[0]:.2f} ms",
                f"{1e3 * step[best]:.2f} ms ({best})",
                f"{speed[best]:,.0f}",
                published,
            )
        )
    names = ("", "weights of a rank", "nextn 0", "best nextn", "tokens/s, most", "published")
    return table(names, rows)


def model_sizes() -> str:
    """Return the table in docs/models.md of every published model's parameters and stored bytes."""
    from mtpbuild.builder.models import find_family_of, load_config
    from mtpbuild.builder.plan.recipe import load_recipes

    rows = []
    for recipe in load_recipes():
        if recipe.repository is None:
            continue
        plan = json.loads(run(f"mtpbuild plan --model {recipe.name} --nextn 0 --json"))
        local = json.loads(run(f"mtpbuild plan --model {recipe.name} --nextn 0 --cpu --json"))
        main = local["portions"][0]["parameters"]
        config = load_config(recipe.config_folder)
        mains = (one for one in plan["classes"] if not one["mtp"] and one["name"] == "experts")
        experts = sum(one["parameters"] for one in mains)
        used = plan["distinct_experts"][0] / max(1, config.n_routed_experts)  # by one token
        counts = (main, main - round(experts * (1 - used)))
        sizes = (f"{count / 1e9:,.3f}" for count in counts)
        stored = gigabytes(plan["checkpoint_bytes"])
        family = find_family_of(config).name.removesuffix("ForCausalLM")
        rows.append((f"`{recipe.name}`", family, *sizes, stored, recipe.layout))
    head = ("recipe", "class", "main model", "active", "stored", "format")
    return table(head, sorted(rows))


def copy_table(file: str, heading: str, columns: tuple[int, ...]) -> str:
    """Return some columns of a record's first table after a heading, with its date and machine.

    file: of benchmarks/results/. The date and the machine stand before the table, or in the
    record's first lines.
    """
    text = (ROOT / "benchmarks" / "results" / file).read_text(encoding="utf-8")
    before, _, section = text.partition(f"\n## {heading}\n")
    said, _, rest = section.partition("\n|")
    lines = f"|{rest}".partition("\n\n")[0].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    facts = [
        next(match[0] for part in (said, before) if (match := re.search(pattern, part)))
        for pattern in (r"\d+ \w+ 20\d\d", r"2 cores of an AMD EPYC[\w ,-]*?(?=, |; )")
    ]
    anchor = re.sub(r"[^a-z0-9-]", "", heading.lower().replace(" ", "-"))
    source = f"[Measured](../benchmarks/results/{file}#{anchor}) on {', '.join(facts)}:\n\n"
    chosen = [[row[i] for i in columns] for row in (head, *rows)]
    return source + table(chosen[0], chosen[1:])


def peers() -> str:
    return copy_table(
        "2026-11-epyc.md", "Beside what a user would pick instead", (0, 1, 2, 3, 5, 7)
    )


def mixture() -> str:
    return copy_table("2026-11-epyc.md", "One machine", (0, 1, 2, 3))


def users() -> str:
    return copy_table("2026-11-avx512.md", "Many users", (0, 1, 2, 3, 4, 5))


LONG = {"long_contexts", "model_sizes", "streams_bounds"}  # tables that take half a minute
TABLES: dict[str, Callable[[], str]] = {
    maker.__name__: maker
    for maker in (
        *(cpu_engines, published_speeds, r1_sizes, long_contexts, model_sizes),
        *(streams_bounds, peers, mixture, users),
    )
}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    head = list(head)
    lines = (head, ["---"] * len(head), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def gigabytes(count: float, digits: int = 2) -> str:
    return f"{count / 1e9:,.{digits}f} GB"


def rewritten(document: Path, marks: Iterable[str | None] = (None, "long")) -> str:
    """Return a document's text with what commands print now, in all blocks with these marks."""

    def fenced(match: re.Match[str]) -> str:
        block = block_of(document, match)
        if block.language != "console" or block.mark not in marks:
            return match[0]
        new = console(block)
        if unmeasured(new) == unmeasured(block.text):
            return match[0]
        return match[0].replace(match["text"], textwrap.indent(new, match["indent"]))

    def figures(match: re.Match[str]) -> str:
        if ("long" if match["name"] in LONG else None) not in marks:
            return match[0]
        return match["name"] + match["head"] + TABLES[match["name"]]()

    text = FENCED.sub(fenced, document.read_text(encoding="utf-8"))
    return FIGURES.sub(figures, text)


def unmeasured(text: str) -> str:
    return MEASURED.sub("?", text)


def differences(document: Path, new: str) -> list[str]:
    """List a document's lines that commands do not print, and what they print instead."""
    old, name = document.read_text(encoding="utf-8"), document.relative_to(ROOT).as_posix()
    lines = old.splitlines(), new.splitlines()
    return list(difflib.unified_diff(*lines, name, "what is printed", lineterm="", n=0))


@contextlib.contextmanager
def folder_with_engines() -> Iterator[None]:
    """Change to an empty folder, and build the engines in it that the documents use."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        print(run("mtpbuild build --model deepseek-tiny --nextn 0,3"), end="")
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("documents", nargs="*", type=Path, default=DOCUMENTS)
    parser.add_argument("--check", action="store_true", help="change nothing")
    asked = parser.parse_args()
    wrong = 0
    documents = [path.resolve() for path in asked.documents]
    with folder_with_engines():
        for document in documents:
            new = rewritten(document)
            found = differences(document, new)
            wrong += bool(found)
            print("\n".join(found) or f"{document.relative_to(ROOT)}: as printed")
            if not asked.check:
                document.write_text(new, encoding="utf-8")
    sys.exit(1 if wrong and asked.check else 0)


if __name__ == "__main__":
    main()
