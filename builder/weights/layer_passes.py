"""A plain model whose layers are in memory one at a time, to run texts through any model."""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mtpbuild.builder.models import ModelConfig, find_family_of
from mtpbuild.builder.models.common.plain import PlainCausalLM
from mtpbuild.builder.models.common.rope import compute_rope_tables
from mtpbuild.builder.stages import Watch, say_time_left
from mtpbuild.builder.weights.checkpoint import Checkpoint
from mtpbuild.builder.weights.quantised_view import Parts, QuantisedView

BATCH = 2048  # most tokens that go through a layer together
# A step takes the hidden states [B, T, E] of each batch and yields the next ones, one batch at a
# time. What else it computes it puts into the parts.
LayerPass = Callable[[Iterable[Tensor], Parts], Iterator[Tensor]]


class KnownEmbedding(nn.Module):
    """The rows of an embedding that some tokens need."""

    def __init__(self, checkpoint: Checkpoint | QuantisedView, name: str, tokens: Tensor) -> None:
        super().__init__()
        self.tokens, rows, start = tokens.unique(), list[Tensor](), 0
        for piece in checkpoint.rows(name):
            end = start + len(piece)
            here = self.tokens[(self.tokens >= start) & (self.tokens < end)]
            rows.append(piece[here - start])
            start = end
        self.rows = torch.cat(rows)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.rows[torch.searchsorted(self.tokens, tokens.contiguous())]


class StreamedModel:
    """A checkpoint's plain model; of its weights only the embedding's known rows are in memory.

    Its head is the identity, so logits are the head's inputs.
    """

    def __init__(
        self, checkpoint: Checkpoint | QuantisedView, config: ModelConfig, batches: Sequence[Tensor]
    ) -> None:
        self.checkpoint, self.config = checkpoint, replace(config, draft_ids=())
        self.batches = batches
        self.family = find_family_of(config)
        with torch.device("meta"):
            plain: Any = self.family.reference(self.config)
        self.plain = plain.eval().requires_grad_(False)
        self._names = {module: name for name, module in plain.named_modules()}
        if isinstance(plain, PlainCausalLM):
            longest = max(batch.shape[1] for batch in batches)
            width = 2 * plain.cos.shape[-1]
            plain.cos, plain.sin = compute_rope_tables(config.rope, width, longest)
        self.plain.lm_head = nn.Identity()
        tokens = torch.cat([batch.flatten() for batch in batches])
        for name, part in plain.model.named_children():
            at = self.name_of(part)
            if isinstance(part, nn.Embedding):
                setattr(plain.model, name, KnownEmbedding(checkpoint, f"{at}.weight", tokens))
            elif part is not plain.model.norm and not [*part.children()]:
                self._load(part)  # it makes the layers' inputs

    def name_of(self, module: nn.Module) -> str:
        return self._names[module]

    @contextmanager
    def loaded(self, module: nn.Module) -> Iterator[dict[str, nn.Linear]]:
        """Hold a module's weights in memory; yield its products by their weights' names."""
        at = self._load(module)
        try:
            yield {
                f"{at}.{name}.weight": part
                for name, part in module.named_modules()
                if isinstance(part, nn.Linear)
            }
        finally:
            module.to("meta")

    def _load(self, module: nn.Module) -> str:
        """Read a module's weights; return its name."""
        at, same = self.name_of(module), self.family.duplicates(self.config)
        names = {key: f"{at}.{key}" for key in module.state_dict()}
        weights = {key: self.checkpoint.read(same.get(name, name)) for key, name in names.items()}
        module.load_state_dict(weights, assign=True)
        return at

    def inputs(self, i: int, hidden: Iterable[Tensor]) -> Iterable[Tensor]:
        """Return the inputs of main layer i, from the hidden states of the layer before it."""
        return hidden if i else map(self.plain.embed, self.batches)

    def run_norm(self, hidden: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the trunk's hidden states as MTP modules read them, with its norm in memory."""
        norm, normed = self.plain.model.norm, self.config.mtp.trunk_normed
        with self.loaded(norm):
            yield from (norm(x) if normed else x for x in hidden)

    def run_layer(self, i: int, x: Tensor) -> Tensor:
        """Run main layer i, which is loaded, on hidden states x [B, T, E]."""
        y: Tensor = self.plain.run_layer(i, x)
        return y


@dataclass(frozen=True)
class LayerPasses:
    """Steps through a model, each with a folder of its own for a file per batch.

    A run that was cut off goes on from its last whole step.
    """

    folder: Path
    watch: Watch

    def run(self, steps: Sequence[tuple[str, LayerPass]]) -> None:
        """Run what an earlier run left of these named steps."""
        start, done = time.monotonic(), self._count_finished()
        for number, (name, step) in enumerate(steps[done:], done):
            left = say_time_left(start, number - done, len(steps) - number)
            self.watch(f"{name} ({number + 1} of {len(steps)}{left})")
            shutil.rmtree(new := self.folder / "unfinished", ignore_errors=True)
            new.mkdir()
            parts: Parts = {}
            hidden = map(read_hidden, self.files(number - 1))
            for b, x in enumerate(step(hidden, parts)):
                save_file({"hidden": x.contiguous()}, new / f"{b}.safetensors")
            save_file({n: tensor.contiguous() for n, tensor in parts.items()}, new / "parts")
            os.replace(new / "parts", self.parts(number))
            new.rename(self._name_place(number))  # the last of a step, so what is there is whole
            shutil.rmtree(self._name_place(number - 1), ignore_errors=True)

    def parts(self, number: int) -> Path:
        """Return the file of a step's parts."""
        return self.folder / f"parts-{number}.safetensors"

    def files(self, number: int) -> list[Path]:
        """Return the files of a step's hidden states, by batch."""
        place = self._name_place(number)
        return [place / f"{b}.safetensors" for b in range(len([*place.glob("*")]))]

    def _name_place(self, number: int) -> Path:
        return self.folder / f"hidden-{number}"

    def _count_finished(self) -> int:
        last = [int(path.name.partition("-")[2]) for path in self.folder.glob("hidden-*")]
        return max(last, default=-1) + 1


def read_hidden(path: Path) -> Tensor:
    return load_file(path)["hidden"]


def make_batches(texts: Iterable[Sequence[int]]) -> list[Tensor]:
    """Batch texts of about the same length, and cut each batch to its shortest one."""
    groups = list[list[Sequence[int]]]()
    for text in sorted(filter(None, texts), key=len):
        last = groups[-1] if groups else []
        if last and (len(last) + 1) * len(last[0]) <= BATCH and len(text) < 1.1 * len(last[0]):
            last.append(text)
        else:
            groups.append([text])
    return [torch.tensor([text[: len(group[0])] for text in group]) for group in groups]
