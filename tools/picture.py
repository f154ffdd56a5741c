"""Draws the terminal output of a real `mtpbuild run`: docs/run.svg.

python tools/picture.py engines/tiny_n3 --out docs/run.svg
"""

import argparse
import io

from rich.console import Console
from rich.text import Text

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.cli.terminal import summary

QUESTION = "What is 47 + 85?"


def draw(console: Console, engine: Engine, command: str, prompt: str) -> None:
    """Print the command line, the streamed text with accepted drafts in green, and the summary."""
    console.print(Text(f"$ {command}", style="bold"))
    line = Text()
    with engine.stream(prompt, SamplingParams(max_tokens=256)) as stream:
        for chunk in stream:
            for span in chunk.spans:
                line.append(span.text, style="green" if span.from_draft else "")
        result = stream.result()
    console.print(line)
    console.print(Text(summary(result), style="dim"))
    console.print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--out", default="docs/run.svg")
    arguments = parser.parse_args()
    console = Console(record=True, width=100, file=io.StringIO())
    with Engine.load(arguments.engine, prefix_cache=False) as engine:
        chat = engine.chat_prompt([{"role": "user", "content": QUESTION}])
        engine.generate(chat, SamplingParams(max_tokens=64))  # warm up
        draw(console, engine, f'mtpbuild run --engine {arguments.engine} --chat "{QUESTION}"', chat)
    console.save_svg(arguments.out, title="accepted draft tokens are green")


if __name__ == "__main__":
    main()
