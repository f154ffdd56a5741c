"""Calibrate int4 weights: run texts through a model layer by layer, and round with GPTQ.

Every layer sees what the unquantised layers before it say. A finished layer's weights are in a file
of their own, so that a calibration that was cut off goes on from there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from mtpbuild.builder.checkpoint.config import HEAD as HEAD_PREFIX
from mtpbuild.builder.formats import refuse_too_large, refuse_too_small
from mtpbuild.builder.formats.integers import INT4
from mtpbuild.builder.models import ModelConfig
from mtpbuild.builder.models.common.copies import HEAD
from mtpbuild.builder.stages import Watch
from mtpbuild.builder.weights.checkpoint import PIECE
from mtpbuild.builder.weights.gptq import correct_errors, encode_calibrated
from mtpbuild.builder.weights.layer_passes import LayerPass, LayerPasses, StreamedModel
from mtpbuild.builder.weights.quantised_view import Parts, QuantisedView

TILE = 1024  # rows of a sum that are added to together
LEAST_TOKENS = 128  # a weight that fewer tokens reach, such as a rare expert's, is not calibrated
SCALE = INT4.suffixes[1]
ADDING = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
Hidden = Iterable[Tensor]  # [B, T, E] of each batch


@dataclass
class InputSums:
    """For each product the sum of x x^T over its inputs x; products with the same input share it.

    Of a sum only the upper triangle is valid, and the whole tiles on its diagonal.

    sums, counts: by the first of the products that share an input.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)  # product -> the first with its input
    _seen: dict[int, tuple[Tensor, str]] = field(default_factory=dict)  # inputs of this batch

    def add(self, name: str, x: Tensor, weights: Tensor | None = None) -> None:
        """Add the inputs x [.., K] of a product; weights: of each input [.., 1]."""
        _, known = self._seen.setdefault(id(x), (x, name))
        if self.first.setdefault(name, known) == name:
            rows = (x if weights is None else x * weights).flatten(0, -2).float()
            width = rows.shape[1]
            if name not in self.sums:
                self.sums[name] = rows.new_zeros(width, width)
            for start in range(0, width, TILE):
                tile = slice(start, start + TILE)
                self.sums[name][tile, start:].addmm_(rows[:, tile].T, rows[:, start:])
            self.counts[name] = self.counts.get(name, 0) + len(rows)

    def add_run(
        self, products: Mapping[str, nn.Module], run: Callable[[], Tensor], width: int | None = None
    ) -> Tensor:
        """Run a layer on a batch, add the inputs of all its products, and return its results.

        width: of the hidden states, with which a result begins; None: it is all of it.

        An error of a product that adds to the residual stream matters as much as it is large
        beside that: so such inputs are divided by the norm of their token's result. Else a
        text's first token, whose stream may be a thousand times as large, would decide alone.
        """
        inputs = list[tuple[str, Tensor]]()

        def hook(name: str) -> Callable[..., None]:
            return lambda module, operands: inputs.append((name, operands[0]))

        hooks = [part.register_forward_pre_hook(hook(name)) for name, part in products.items()]
        try:
            y = run()
        finally:
            for each in hooks:
                each.remove()
        norms = y[..., :width].float().norm(dim=-1, keepdim=True).clamp(min=1e-6)
        weights = norms.median() / norms
        for name, x in inputs:
            adds = name.endswith(ADDING) and x.shape[:-1] == y.shape[:-1]  # not of some tokens
            self.add(name, x, weights if adds else None)
        self.end_batch()
        return y

    def end_batch(self) -> None:
        """Forget which inputs were added: equal memory holds others in the next batch."""
        self._seen.clear()

    def shares(self) -> Iterator[tuple[Tensor, list[str]]]:
        """Yield what `correct_errors` returns for each input of enough tokens, and its products."""
        for name in [*self.sums]:
            total = self.sums.pop(name)  # so that it can be freed
            if self.counts[name] >= LEAST_TOKENS:
                yield correct_errors(total), [n for n, known in self.first.items() if known == name]


@dataclass
class Calibration:
    """A calibration of a view's int4 weights, whose state is in `folder`."""

    view: QuantisedView
    config: ModelConfig
    batches: Sequence[Tensor]  # tokens [B, T]
    folder: Path
    watch: Watch

    def __post_init__(self) -> None:
        self.model = StreamedModel(self.view.source, self.config, self.batches)

    @torch.no_grad()
    def run(self) -> QuantisedView:
        """Calibrate what an earlier run left, and return the view with all calibrated weights."""
        steps, run = [*self._list_steps()], LayerPasses(self.folder, self.watch)
        run.run(steps)
        files = dict[str, Path]()
        for number in range(len(steps)):
            path = run.parts(number)
            with safe_open(path, framework="pt") as file:
                files |= {n: path for n in file.keys() if not n.endswith(SCALE)}  # noqa: SIM118
        return replace(self.view, calibrated=files)

    @property
    def wanted(self) -> list[str]:
        """The weights to calibrate."""
        return [name for name in self.view.formats if self._is_wanted(name)]

    def _list_steps(self) -> Iterator[tuple[str, LayerPass]]:
        """Yield a name and a function for each step."""
        c = self.config
        for i in range(c.num_hidden_layers):
            yield f"calibrate layer {i}", partial(self._calibrate_layer, i)
        yield "calibrate head", self._calibrate_head
        for k in range(1, 1 if c.head else c.num_nextn_predict_layers + 1):
            yield f"calibrate MTP module {k}", partial(self._calibrate_module, k)

    def _calibrate_layer(self, i: int, hidden: Hidden, parts: Parts) -> Iterator[Tensor]:
        run = (partial(self.model.run_layer, i, x) for x in self.model.inputs(i, hidden))
        return self._calibrate(self.model.plain.model.layers[i], run, parts)

    def _calibrate_module(self, k: int, hidden: Hidden, parts: Parts) -> Iterator[Tensor]:
        """Calibrate MTP module k, from 1; hidden: of the module before it, or of the trunk."""
        plain, module = self.model.plain, self.model.plain.module(k)

        def run(tokens: Tensor, x: Tensor) -> Tensor:
            y = plain.mtp(k, tokens[:, k:], x[:, : tokens.shape[1] - k])
            if module.own("head") is not None:
                plain.draft_logits(k, y)
            return y

        pairs = zip(self.batches, hidden, strict=True)
        return self._calibrate(module, (partial(run, t, x) for t, x in pairs), parts)

    def _calibrate_head(self, hidden: Hidden, parts: Parts) -> Iterator[Tensor]:
        """Calibrate the head; yield the trunk's hidden states as MTP modules read them."""
        plain, sums = self.model.plain, InputSums()
        for x in self.model.run_norm(hidden):
            if self._is_wanted(HEAD):
                sums.add(HEAD, plain.head_input(x))
                sums.end_batch()
            yield x
        rows = self.view.source.rows
        parts |= self._encode(sums, lambda name: rows(name))

    def _calibrate(
        self, module: nn.Module, runs: Iterable[Callable[[], Tensor]], parts: Parts
    ) -> Iterator[Tensor]:
        """Run a module on all batches, and calibrate its weights."""
        with self.model.loaded(module) as products:
            wanted = {name: part for name, part in products.items() if self._is_wanted(name)}
            sums = InputSums()
            for run in runs:
                yield sums.add_run(wanted, run, self.config.hidden_size)
            parts |= self._encode(sums, lambda name: wanted[name].weight.split(PIECE))

    def _encode(self, sums: InputSums, rows: Callable[[str], Iterable[Tensor]]) -> Parts:
        """Encode all weights whose inputs' sums are there, pieces of rows side by side.

        Each thread computes alone: the operations on single columns are too short to be shared out.
        """
        parts: Parts = {}
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for shares, names in sums.shares():
                for name in names:
                    encode = partial(encode_calibrated, INT4, shares=shares)
                    whole = [*rows(name)]
                    for piece in whole:
                        refuse_too_large(INT4, name, piece)
                    refuse_too_small(INT4, name, torch.stack([*map(INT4.sum_coarse, whole)]).sum(0))
                    pieces = [*pool.map(torch.no_grad()(encode), whole)]
                    for suffix in INT4.suffixes:
                        parts[name + suffix] = torch.cat([piece[suffix] for piece in pieces])
        return parts

    def _is_wanted(self, name: str) -> bool:
        return self.view.formats.get(name) is INT4 and not name.startswith(f"{HEAD_PREFIX}.")
