"""Train MTP modules on the trunk's hidden states; trunk, embedding and head stay as they are."""

import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from mtpbuild.builder.models.common.copies import HEAD
from mtpbuild.builder.models.common.plain import PlainCausalLM
from mtpbuild.builder.stages import Watch, say_time_left
from mtpbuild.builder.weights.layer_passes import BATCH, StreamedModel, read_hidden
from mtpbuild.lab.tune.chains import run_chain

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The trunk's logits are multiplied by this, as acceptance depends on its first choice.
SHARPNESS = 2.0
ROWS = 512  # places whose logits are in memory at once
SAVE_SECONDS = 30.0
WARM_UP = 0.05  # of the steps
MEASURED = 10  # times in a training
STATE, BEST, UNFINISHED = "training.pt", "best.pt", "unfinished.pt"
FROZEN = ("embed_tokens.weight", "shared_head.head.weight")  # a module's own


@dataclass(frozen=True)
class Batch:
    """Texts that a step trains on: prompts and answers."""

    tokens: Tensor  # [B, T]
    first: Tensor  # [B] the last place of each prompt, from which on an engine drafts
    hidden: Path  # the trunk's hidden states


@dataclass(frozen=True)
class Training:
    """How modules are trained: for which drafts, which of their weights, and how long."""

    nextn: int
    eagle: bool  # module 1 makes all drafts; else module k makes draft k
    lora: int | None  # rank of what is added to each product; None: all weights are trained
    dtype: str
    lr: float
    epochs: int
    draft_ids: tuple[int, ...] = ()  # the tokens that are drafted; () means all

    @property
    def modules(self) -> range:
        """The numbers of the modules that are trained, from 1."""
        return range(1, 2 if self.eagle else self.nextn + 1)

    def memory(self, plain: PlainCausalLM, drafted: int) -> int:
        """Estimate the bytes that the training takes; drafted: tokens of the draft vocabulary."""
        c = plain.config
        trained = 0
        frozen = drafted * c.hidden_size  # the head
        for k in self.modules:
            for name, weight in plain.module(k).named_parameters():
                if self.lora is None and not name.endswith(FROZEN):
                    trained += weight.numel()
                    continue
                frozen += weight.numel()
                trained += (self.lora or 0) * sum(weight.shape) if weight.dim() == 2 else 0
        logits = 4 * ROWS * drafted  # of both models, with gradients
        activations = 50 * self.nextn * BATCH * c.hidden_size
        kept = DTYPES[self.dtype].itemsize * frozen
        return 16 * trained + kept + 4 * (logits + activations)  # a gradient and Adam's two, too


class LowRank(nn.Module):
    """A weight with the product of two small ones added, which are trained in its place."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.down = nn.Parameter(torch.randn(rank, columns) / columns**0.5)
        self.up = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return (weight + self.up @ self.down).type_as(weight)


def backward(plain: PlainCausalLM, batch: Batch, how: Training) -> float:
    """Add the gradients of a batch's mean loss over all drafts of all steps; return the loss.

    The loss is the cross-entropy with the trunk's own next token, where it may be drafted.
    """
    hidden = read_hidden(batch.hidden)
    T = batch.tokens.shape[1]
    after = torch.arange(T) >= batch.first[:, None]
    may_be_drafted = find_drafted(batch.tokens, how)
    places = [after[:, : max(0, T - j)] & may_be_drafted[:, j:] for j in range(1, how.nextn + 1)]
    count = max(1, sum(int(some.sum()) for some in places))
    total = 0.0
    ends = list[tuple[Tensor, Tensor]]()
    for j, (k, g) in enumerate(run_chain(plain, batch.tokens, hidden, how.nextn, how.eagle), 1):
        leaf = g.detach().requires_grad_()  # logits are many: some at a time, each with its part
        for some in places[j - 1].nonzero().split(ROWS):
            row, q = some.unbind(1)
            with torch.no_grad():
                wanted = (SHARPNESS * plain.logits(hidden[row, q + j]).float()).softmax(-1)
            logprobs = plain.draft_logits(k, leaf[row, q]).float().log_softmax(-1)
            loss = -(wanted * logprobs).sum() / count
            loss.backward()
            total += loss.item()
        if leaf.grad is not None:
            ends.append((g, leaf.grad))
    if ends:
        torch.autograd.backward([g for g, _ in ends], [gradient for _, gradient in ends])
    return total


def find_drafted(tokens: Tensor, how: Training) -> Tensor:
    """Tell for each place of texts [B, T] whether the token after it may be drafted."""
    if not how.draft_ids:
        return torch.ones_like(tokens, dtype=torch.bool)
    return F.pad(torch.isin(tokens[:, 1:], torch.tensor(how.draft_ids)), (0, 1))


@torch.no_grad()
def measure_acceptance(
    plain: PlainCausalLM, batches: Iterable[Batch], how: Training
) -> list[float]:
    """Return for each draft how often it and those before it are the trunk's choices."""
    accepted, count = torch.zeros(how.nextn), 0
    for batch in batches:
        hidden = read_hidden(batch.hidden)
        T = batch.tokens.shape[1]
        places = (torch.arange(T) >= batch.first[:, None])[:, : max(0, T - how.nextn - 1)].nonzero()
        may_be_drafted = find_drafted(batch.tokens, how)
        count += len(places)
        chain = [*run_chain(plain, batch.tokens, hidden, how.nextn, how.eagle)]
        for row, q in (some.unbind(1) for some in places.split(ROWS)):
            same = torch.ones(len(row), dtype=torch.bool)
            for j, (k, g) in enumerate(chain, 1):
                wanted = plain.logits(hidden[row, q + j]).argmax(-1)
                same &= plain.draft_logits(k, g[row, q]).argmax(-1) == wanted
                same &= may_be_drafted[row, q + j]
                accepted[j - 1] += same.sum()
    return (accepted / max(1, count)).tolist()


@dataclass
class Trainer:
    """A training whose state is in a folder, so that one that was cut off goes on.

    The weights that it ends with are those of the best measurement on the texts held out, if there
    are some.
    """

    model: StreamedModel
    batches: Sequence[Batch]
    how: Training
    folder: Path
    watch: Watch
    held_out: Sequence[Batch] = ()
    best: list[float] = field(default_factory=list)  # acceptance by position

    def run(self) -> dict[str, Tensor]:
        """Train what an earlier run left; return the modules' weights by their names."""
        model = self.model
        plain = self.model.plain
        how = self.how
        torch.manual_seed(0)
        with ExitStack() as stack:
            stack.enter_context(model.loaded(plain.model.norm))
            plain.lm_head = self._find_head()
            for k in how.modules:
                self._prepare(plain.module(k), stack.enter_context(model.loaded(plain.module(k))))
            trained = [weight for _, weight in self._list_trained()]
            self._train(torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.0))
            return dict(self._list_weights())

    def _find_head(self) -> nn.Linear:
        c = self.model.config
        rows = len(self.how.draft_ids) or c.vocab_size
        head = nn.Linear(c.hidden_size, rows, bias=False, device="meta")
        same = self.model.family.duplicates(c)
        weight = self.model.checkpoint.read(same.get(HEAD, HEAD)).to(DTYPES[self.how.dtype])
        if self.how.draft_ids:
            weight = weight[list(self.how.draft_ids)]
        head.load_state_dict({"weight": weight}, assign=True)
        return head.requires_grad_(False)

    def _prepare(self, module: nn.Module, products: dict[str, nn.Linear]) -> None:
        """Choose a module's weights to train; the others are in memory in the training's dtype."""
        how = self.how
        c = self.model.config
        family = self.model.family
        for name, weight in module.named_parameters():
            weight.requires_grad_(how.lora is None and not name.endswith(FROZEN))
            if not weight.requires_grad:
                weight.data = weight.data.to(DTYPES[how.dtype])
        if how.lora is None:
            return
        for name, part in products.items():
            if family.may_be_quantised(c, name) is not None or family.is_module_input_proj(c, name):
                low = LowRank(part.weight, how.lora)
                parametrize.register_parametrization(part, "weight", low)

    def _list_trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        named = self.model.plain.named_parameters()
        return ((name, weight) for name, weight in named if weight.requires_grad)

    def _train(self, optimizer: torch.optim.Optimizer) -> None:
        steps = self.how.epochs * len(self.batches)
        epoch_tokens = sum(batch.tokens.numel() for batch in self.batches)
        done = self._resume(optimizer)
        start = saved = time.monotonic()
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=self.how.dtype == "bf16")
        for number in range(done, steps):
            epoch, place = divmod(number, len(self.batches))
            order = random.Random(epoch).sample(self.batches, len(self.batches))
            rate = self.how.lr * min(1.0, (number + 1) / (WARM_UP * steps), 1 - number / steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            with autocast:
                loss = backward(self.model.plain, order[place], self.how)
            nn.utils.clip_grad_norm_([weight for _, weight in self._list_trained()], 1.0)
            optimizer.step()
            left = say_time_left(start, number + 1 - done, steps - number - 1)
            measured = ", ".join(f"{share:.2f}" for share in self.best)
            best = f", at best {measured} of held-out drafts accepted" if measured else ""
            tokens = epoch_tokens * (steps - number - 1) // len(self.batches)
            done_so_far = f"train: step {number + 1} of {steps}, {tokens:,} tokens{left}"
            self.watch(f"{done_so_far}, loss {loss:.3f}{best}")
            if self.held_out and (number + 1) * MEASURED // steps > number * MEASURED // steps:
                with autocast:
                    self._measure()
            if number + 1 == steps or time.monotonic() - saved > SAVE_SECONDS:
                self._save(STATE, done=number + 1, optimizer=optimizer.state_dict())
                saved = time.monotonic()
        if self.best:
            self._load_weights(torch.load(self.folder / BEST, weights_only=True))

    def _measure(self) -> None:
        """Measure the drafts of texts held out, and save the weights if these are the best."""
        shares = measure_acceptance(self.model.plain, self.held_out, self.how)
        if sum(shares) > sum(self.best, -1.0):
            self.best = shares
            self._save(BEST)

    def _save(self, file: str, **state: Any) -> None:
        weights = {name: weight.detach() for name, weight in self._list_trained()}
        torch.save(
            {"best": self.best, "weights": weights, **state}, new := self.folder / UNFINISHED
        )
        os.replace(new, self.folder / file)

    def _load_weights(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, weight in self._list_trained():
                weight.copy_(state["weights"][name])

    def _resume(self, optimizer: torch.optim.Optimizer) -> int:
        """Load what an earlier run saved; return its number of steps."""
        if not (path := self.folder / STATE).is_file():
            return 0
        state: dict[str, Any] = torch.load(path, weights_only=True)
        self._load_weights(state)
        self.best = state["best"]
        optimizer.load_state_dict(state["optimizer"])
        return int(state["done"])

    @torch.no_grad()
    def _list_weights(self) -> Iterator[tuple[str, Tensor]]:
        for k in self.how.modules:
            module = self.model.plain.module(k)
            for part in [*module.modules()]:
                if parametrize.is_parametrized(part):
                    parametrize.remove_parametrizations(part, "weight")
            for name, weight in module.state_dict().items():
                yield f"{self.model.name_of(module)}.{name}", weight.clone()


def make_model_batches(
    model: StreamedModel, firsts: Sequence[int], files: Sequence[Path]
) -> list[Batch]:
    """Join a model's batches, the last place of each row's prompt, and their hidden states."""
    rows = list[Batch]()
    start = 0
    for tokens, file in zip(model.batches, files, strict=True):
        end = start + len(tokens)
        rows.append(Batch(tokens, torch.tensor(firsts[start:end]), file))
        start = end
    return rows
