"""Measures models of a real size on one machine, and compares speed and memory with their aims.

    tools/peers_env.sh                            # once: llama.cpp, in .venv-peers
    python benchmarks/one_machine.py --layers 4   # a quick look
    python benchmarks/one_machine.py [--only SECTION,SECTION] [--rounds 3]

It writes checkpoints with random quantised blocks and GGUF files of the same shapes, builds
engines, and runs each side in its own process, in turn. Its tables show figures with their bounds
by this machine's memory and arithmetic, llama.cpp's figures, and ratios with their aims.
The two sides have equal shapes but different weights; their bytes differ as the formats do.

A section's figures are stored in --out as soon as it ends. A stored section is printed and not
measured again, unless with --again. --work needs up to 30 GB at a time.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from one.compressed import Compressed
from one.contexts import Contexts
from one.larger import Larger
from one.machine import machine_of, measure_machine
from one.prompts import Prompts
from one.published import Published
from one.run import Run
from one.section import Found, Section
from one.shapes import DENSE, HYBRIDS, MOE, WINDOWED
from rich.console import Console
from rich.table import Table
from script import PEERS, run

from mtpbuild.runtime.errors import MtpbuildError, UsageError


def hybrid(recipe: str, nextn: int) -> Published:
    """Return the section of a Qwen3.5; each draft is accepted with probability 0.8."""
    rates = tuple(0.8**j for j in range(1, nextn + 1))
    return Published(recipe, nextn, rates, reduced_gain=1.7, filled=False, their_gain=1.4)


def windowed(recipe: str, layers: int, *, dense: bool) -> Published:
    """Return the section of a Gemma-4 with caches of int8 and its assistant's three drafts."""
    return Published(
        recipe,
        3,
        (0.8, 0.64, 0.51),
        own_gain=1.9 if dense else 1.2,
        bits=None,  # products for keys and values are int8
        layers=layers,
        long=8192,
        prompt=1024,
        flags=("--cache-dtype", "int8"),
        short_aim=1.0 if dense else 0.8,
        long_aim=0.9 if dense else 0.7,
        prompt_aim=2.0,
        filled=False,
        their_gain=1.0 if dense else 1.25,
    )


SECTIONS: dict[str, Section] = {
    "moe": Published(MOE, 1, (0.85,), reduced_gain=1.3, gain=1.15, disk=6.8),
    # The first draft is accepted with probability 0.85, then the second one with 0.7.
    "dense": Published(DENSE, 2, (0.85, 0.85 * 0.7), reduced_gain=1.6),
    "contexts": Contexts(MOE),
    "contexts-dense": Contexts(DENSE),
    "prompts": Prompts(),
    "hybrid": hybrid(HYBRIDS[0], 3),
    "hybrid-4b": hybrid(HYBRIDS[1], 2),
    "hybrid-9b": hybrid(HYBRIDS[2], 2),
    "windowed": windowed(WINDOWED[0], 8, dense=True),
    "windowed-moe": windowed(WINDOWED[1], 12, dense=False),
    "v4": Compressed(),
    "larger-than-memory": Larger(),
}
ROOTS = ("larger-than-memory",)  # sections that need root
WIDTH = 150  # least columns of the output


def load(out: Path) -> dict[str, Any]:
    """Read the sections that were measured before, by name."""
    if not out.exists():
        return {}
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def store(out: Path, sections: dict[str, Any]) -> None:
    """Replace the file atomically, so that a reader never sees half of it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.part")
    part.write_text(json.dumps(sections, indent=1) + "\n", encoding="utf-8")
    os.replace(part, out)


def measure(name: str, how: Run, keep: bool) -> dict[str, Any]:
    """Measure a section's figures, and then remove its files."""
    how.folder.mkdir(parents=True, exist_ok=True)
    try:
        return SECTIONS[name].measure(how)
    finally:
        if not keep:
            shutil.rmtree(how.folder, ignore_errors=True)


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that must be equal for a stored section to be reused."""
    return {name: getattr(arguments, name) for name in ("layers", "rounds", "steps", "threads")}


def about(measured: dict[str, Any]) -> Table:
    """Return the table of the machine's speeds, from which a section's bounds follow."""
    machine, host = machine_of(measured["figures"]), measured["about"]
    title = f"{host['cpu']}, {host['threads']} threads, {host['date']}"
    grid = Table("what bounds a step", "of this machine", title=title, title_justify="left")
    for size, speed in machine.reading:
        grid.add_row(f"reading {size / 1e6:,.0f} MB again and again", f"{speed / 1e9:.1f} GB/s")
    for name in ("fp32", "int8"):
        grid.add_row(f"products of matrices, {name}", f"{machine.rate(name) / 1e9:,.0f} Gop/s")
    return grid


def show(sections: dict[str, Any], console: Console) -> None:
    """Print all stored sections, each with its machine's speeds at that time."""
    shown: dict[str, Any] = {}
    for name, section in sections.items():
        if section["machine"] != shown:
            shown = section["machine"]
            console.print(about(shown))
        found = Found(section["figures"], machine_of(shown["figures"]))
        console.print(*SECTIONS[name].tables(found))
        for error in failures(section["figures"]):
            console.print(error, style="red", markup=False)


def failures(figures: dict[str, Any]) -> list[str]:
    """Return the errors of the sides that died in a section."""
    found = []
    for key, value in figures.items():
        if key == "rounds":
            for side, rounds in value.items():
                found += [
                    f"{side} {each['error']['message']}" for each in rounds if "error" in each
                ]
        elif isinstance(value, dict):
            found += failures(value)
    return found


def arguments_of() -> argparse.Namespace:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    usual = ",".join(name for name in SECTIONS if name not in ROOTS)
    parser.add_argument("--only", default=usual, help="sections, with commas")
    parser.add_argument("--layers", type=int, help="most layers of a model's trunk; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24, help="steps of each request")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("runs/one_machine"))
    parser.add_argument("--out", type=Path, default=Path("bench_results/one_machine.json"))
    parser.add_argument("--peers-python", type=Path, default=PEERS / "python", help="has llama.cpp")
    parser.add_argument("--ours-alone", action="store_true", help="without llama.cpp")
    parser.add_argument("--again", action="store_true", help="measure stored sections too")
    parser.add_argument("--keep", action="store_true", help="keep checkpoints and engines")
    return parser.parse_args()


def check(arguments: argparse.Namespace) -> list[str]:
    """Return the wanted sections; raise UsageError."""
    names = arguments.only.split(",")
    for name in names:
        if name not in SECTIONS:
            raise UsageError(f"--only {name}: expected any of {', '.join(SECTIONS)}")
    for flag in ("layers", "rounds", "steps", "threads"):
        value = getattr(arguments, flag)
        if value is not None and value < 1:
            raise UsageError(f"--{flag} {value}: expected at least 1")
    if not arguments.ours_alone and not arguments.peers_python.exists():
        raise UsageError(
            f"no {arguments.peers_python}: run tools/peers_env.sh, or give --peers-python or "
            "--ours-alone"
        )
    return names


def main() -> None:
    arguments = arguments_of()
    names, console = check(arguments), Console(width=max(Console().width, WIDTH))
    sections, how_measured = load(arguments.out), settings(arguments)
    old = {name for name in names if sections.get(name, {}).get("settings") == how_measured}
    missing = [name for name in names if arguments.again or name not in old]
    machine = measure_machine(arguments.threads) if missing else None
    failed = []
    for name in missing:
        try:
            figures = measure(name, run_of(arguments, name, console), arguments.keep)
        except (MtpbuildError, OSError) as error:
            failed.append(name)
            console.print(f"{name}: {error}", style="red", markup=False)
            continue
        sections[name] = {"settings": how_measured, "machine": machine, "figures": figures}
        store(arguments.out, sections)
    show({name: sections[name] for name in names if name in sections}, console)
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


def run_of(arguments: argparse.Namespace, name: str, console: Console) -> Run:
    def watch(text: str) -> None:
        console.print(f"{name}: {text}", style="dim", markup=False)

    return Run(
        arguments.work / name,
        arguments.threads,
        arguments.rounds,
        arguments.steps,
        arguments.layers,
        None if arguments.ours_alone else arguments.peers_python,
        watch,
    )


if __name__ == "__main__":
    run(main)
