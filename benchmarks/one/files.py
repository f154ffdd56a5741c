"""A section's checkpoint, engines and GGUF file, and their bytes on disk."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from script import convert, run_command

from one.cost import Counted, count
from one.random_checkpoint import write_checkpoint, write_head
from one.shapes import Shape
from one.sides import list_files

QUARTER = 4  # a reduced draft vocabulary has a quarter of the tokens


@dataclass
class Workshop:
    """A folder for one model's files; `most` is its largest size so far, in bytes."""

    folder: Path
    shape: Shape
    watch: Callable[[str], None]
    most: int = 0

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def head(self) -> Path:
        return self.folder / "head"

    @property
    def vocabulary(self) -> int:
        return self.shape.config.vocab_size

    def write_checkpoint(self) -> Counted:
        self.watch(f"writing a checkpoint of {self.shape.name}, {self.shape.weights}")
        write_checkpoint(self.checkpoint, self.shape)
        if self.shape.head is not None:
            write_head(self.head, self.shape)
        self._weigh()
        return count(self.checkpoint, self.shape)

    def build(self, name: str, nextns: tuple[int | str, ...], *flags: str) -> list[Path]:
        """Build engines of the checkpoint, one folder each; one build's engines share weights.

        Those that draft have the head, if the shape has one.
        """
        self.watch(f"building {name}, nextn {', '.join(map(str, nextns))}")
        out = self.folder / name
        numbers = ",".join(map(str, nextns))
        place = out / f"n{numbers}" if len(nextns) == 1 else out
        command = ["-m", "mtpbuild", "build", "--model", str(self.checkpoint), "--nextn", numbers]
        if self.shape.head is not None and nextns != (0,):
            command += ["--mtp", str(self.head)]
        run_command([sys.executable, *command, "--out", str(place), *flags])
        self._weigh()
        return [next(out.glob(f"*n{nextn}")) for nextn in nextns]

    def draft_vocab(self) -> str:
        """Write the ids of a quarter of the vocabulary; any choice takes the same time."""
        path = self.folder / "draft_ids.json"
        path.write_text(json.dumps([*range(self.vocabulary // QUARTER)]), encoding="utf-8")
        return str(path)

    def write_gguf(self, *, module: bool = False) -> tuple[Path, dict[str, int]]:
        """Write the same shape for llama.cpp; return the file and the bytes of its tensors.

        module: whether the file has the MTP module.
        """
        self.watch(f"writing GGUF, {self.shape.gguf}")
        name = f"{self.shape.gguf}{'-mtp' if module else ''}.gguf"
        config, out = self.folder / "config.json", self.folder / name
        config.write_text(json.dumps(dict(self.shape.raw)), encoding="utf-8")
        flags = ["--module"] if module else []
        sizes: dict[str, int] = json.loads(convert(config, out, self.shape.gguf, *flags))
        self._weigh()
        return out, sizes

    def write_head_gguf(self) -> Path | None:
        """Write the head for llama.cpp, if the shape has one, after the trunk."""
        if self.shape.head is None:
            return None
        config, out = self.folder / "head.json", self.folder / f"{self.shape.gguf}-head.gguf"
        config.write_text(json.dumps(dict(self.shape.head)), encoding="utf-8")
        trunk = str(self.folder / "config.json")
        convert(config, out, self.shape.gguf, "--module", "--trunk", trunk)
        self._weigh()
        return out

    def drop_checkpoint(self) -> None:
        shutil.rmtree(self.checkpoint)

    def _weigh(self) -> None:
        self.most = max(self.most, on_disk(self.folder))


def on_disk(path: Path) -> int:
    """Sum the bytes of a file or of a folder's files; a file with several names counts once."""
    files = (each.stat() for each in list_files(path))
    return sum({stat.st_ino: stat.st_size for stat in files}.values())
