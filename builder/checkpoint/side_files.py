"""List and copy the files beside a checkpoint's weights: tokenizer, templates, defaults."""

import shutil
from pathlib import Path

from mtpbuild.runtime.text import tokenizer_files
from mtpbuild.runtime.text.tokenizer import TOKENIZER

CONFIG = "config.json"
SIDE_FILES = (
    TOKENIZER,
    tokenizer_files.TOKENIZER_CONFIG,
    tokenizer_files.SPECIAL_TOKENS_MAP,
    tokenizer_files.CHAT_TEMPLATE,
    "generation_config.json",
)


def side_files(folder: Path) -> list[str]:
    """Return the names of a folder's side files, including its subfolder of chat templates."""
    named = [name for name in SIDE_FILES if (folder / name).is_file()]
    templates = sorted(
        p for p in (folder / tokenizer_files.MORE_TEMPLATES).glob("*.jinja") if p.is_file()
    )
    return [*named, *(path.relative_to(folder).as_posix() for path in templates)]


def is_side_file(name: str) -> bool:
    return name in SIDE_FILES or name.startswith(f"{tokenizer_files.MORE_TEMPLATES}/")


def copy_side_files(checkpoint: Path, folder: Path, chat_template: Path | None = None) -> None:
    """Copy config.json and the side files that the checkpoint has.

    chat_template: a file that takes the place of all its chat templates.
    """
    for name in (CONFIG, *side_files(checkpoint)):
        if (checkpoint / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(checkpoint / name, folder / name)
    if chat_template is not None:
        shutil.rmtree(folder / tokenizer_files.MORE_TEMPLATES, ignore_errors=True)
        shutil.copyfile(chat_template, folder / tokenizer_files.CHAT_TEMPLATE)
