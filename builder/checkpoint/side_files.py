"""The files beside a checkpoint's weights that an engine or another checkpoint takes along."""

import json
import shutil
from pathlib import Path

CONFIG, TEMPLATE = "config.json", "chat_template.jinja"
SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", TEMPLATE, "generation_config.json")


def copy_side_files(checkpoint: Path, folder: Path) -> None:
    """Copy config.json, and those of `SIDE_FILES` that the checkpoint has."""
    for name in (CONFIG, *SIDE_FILES):
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)
    template = _configured_template(folder / "tokenizer_config.json")
    if template is not None and not (folder / TEMPLATE).exists():
        (folder / TEMPLATE).write_text(template, encoding="utf-8")


def _configured_template(path: Path) -> str | None:
    """The chat template where older checkpoints have it: inside tokenizer_config.json."""
    try:
        template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):  # the run time says what is wrong with the file
        return None
    return template if isinstance(template, str) else None
