"""Teaches small models a text in which a right draft takes all that a head reads.

A token has three parts. The first one follows from the newest token's; training texts have a random
one now and then, so that heads read it from the token. The second one follows from that of the
token two before the newest one, which attention finds by its position. The third one follows from
the newest token's, too, but is hidden in the head's embedding, so that the hidden state tells it.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpbuild.builder.models.common.plain import PlainLM

FIRST, SECOND, THIRD = 4, 4, 3  # values of each part
COUNT = FIRST * SECOND * THIRD  # tokens of texts
LENGTH, BATCH = 14, 16
STEPS, LEARNT = 1000, 0.05
SHIFTED = 0.3  # share of the tokens with a random first part
Mask = Callable[[], Any]
ORDERS = torch.tensor([2, 0, 3, 1]), torch.tensor([1, 3, 0, 2]), torch.tensor([1, 2, 0])


def split(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tokens // (SECOND * THIRD), tokens // THIRD % SECOND, tokens % THIRD


def follow(tokens: Tensor) -> Tensor:
    """Return what follows tokens[:, 2:], from tokens [B, T] to [B, T - 2]."""
    first, second, third = split(tokens)
    parts = first[:, 2:], second[:, :-2], third[:, 2:]
    a, b, c = (order[part] for order, part in zip(ORDERS, parts, strict=True))
    return (a * SECOND + b) * THIRD + c


def write_texts(count: int, length: int) -> Tensor:
    """Draw texts [count, length] that begin with any three tokens."""
    tokens = torch.randint(COUNT, (count, 3))
    while tokens.shape[1] < length:
        following = follow(tokens[:, -3:])
        drawn = torch.randint(FIRST, following.shape) * SECOND * THIRD
        random = torch.rand(following.shape) < SHIFTED
        following = torch.where(random, drawn + following % (SECOND * THIRD), following)
        tokens = torch.cat([tokens, following], dim=1)
    return tokens


def make_embedding(vocabulary: int, width: int) -> tuple[Tensor, Tensor]:
    """Return an embedding [vocabulary, width], and 1 for columns [width] that the third part has.

    Each part has columns of its own; the last ones are 1.
    """
    size = (width - 1) // 3
    codes = [3 * torch.linalg.qr(torch.randn(size, size))[0] for _ in range(3)]
    parts = split(torch.arange(COUNT))
    columns = [code[part] for code, part in zip(codes, parts, strict=True)]
    values = F.pad(torch.cat(columns, dim=1), (0, 0, 0, vocabulary - COUNT))
    embedding = torch.cat([values, torch.ones(vocabulary, width - 3 * size)], dim=1)
    return embedding, (torch.arange(width) // size == 2).float()


def train(
    weights: Iterable[Tensor], measure: Callable[[Tensor], Tensor], mask: Mask = lambda: None
) -> None:
    """Train some weights until the loss of texts is low; mask: is called after each step."""
    weights = list(weights)
    for weight in weights:
        weight.requires_grad_()
    optimizer, mean = torch.optim.Adam(weights, lr=0.015), torch.tensor(4.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = measure(write_texts(BATCH, LENGTH))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            mask()
        mean = 0.8 * mean + 0.2 * loss.detach()
        if mean < LEARNT:
            break
    for weight in weights:
        weight.requires_grad_(False)


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def teach_trunk(trunk: Any, head: Iterable[Tensor] = ()) -> tuple[Tensor, Tensor]:
    """Teach the weights of a family's plain model that are not its head's.

    Returns its embedding, which is made before, and 1 for the columns that have the third part.
    """
    embedding = trunk.model.embed_tokens.weight
    trunk.requires_grad_(False)
    values, hidden = make_embedding(*embedding.shape)
    with torch.no_grad():
        embedding.copy_(values)
    others = {id(weight) for weight in (embedding, *head)}

    def measure(tokens: Tensor) -> Tensor:
        return cross_entropy(trunk.logits(trunk.main(tokens))[:, 2:], follow(tokens))

    train((weight for weight in trunk.parameters() if id(weight) not in others), measure)
    return values, hidden


def teach_head(plain: PlainLM, weights: Iterable[Tensor], mask: Mask = lambda: None) -> None:
    """Teach a head to draft from the trunk's hidden states, and from its own."""

    def measure(tokens: Tensor) -> Tensor:
        hidden, loss = plain.main(tokens), torch.zeros(())
        for j in (1, 2):
            hidden = plain.mtp(1, tokens[:, j:], hidden[:, : tokens.shape[1] - j])
            logits = plain.draft_logits(1, hidden)[:, 2:]
            loss = loss + cross_entropy(logits, follow(tokens[:, j:])) / 2
        return loss

    train(weights, measure, mask)


def teach(plain: Any, token: Tensor, state: Tensor, norm: Tensor) -> None:
    """Teach trunk and first module of a family's plain model.

    token, state: the columns [.., E] of the module's weights that its embedding and the hidden
    state meet. norm: of the hidden state, which becomes one that differs much between columns.
    """
    torch.manual_seed(5)
    module = list(plain.module(1).parameters())
    _, hidden = teach_trunk(plain, module)
    with torch.no_grad():
        norm.uniform_(-2, 2).exp_().sub_(int(plain.config.norms_minus_one))
        state += torch.eye(*state.shape) * hidden
    trained = (weight for weight in module if weight is not norm)
    teach_head(plain, trained, lambda: token.mul_(1 - hidden))


def teach_assistant(trunk: Any, head: Any) -> None:
    """Teach Gemma-4's trunk and its assistant, both transformers'."""
    torch.manual_seed(5)
    trunk.main = lambda tokens: trunk.model(tokens, use_cache=False).last_hidden_state
    trunk.logits = lambda hidden: trunk.lm_head(hidden)  # an attribute would be saved
    _, hidden = teach_trunk(trunk)
    embed, E = trunk.get_input_embeddings(), len(hidden)
    token = head.pre_projection.weight.detach()[:, :E]

    def measure(tokens: Tensor) -> Tensor:
        known = int(torch.randint(4, LENGTH - 1, ()))  # tokens, of which the last has no row
        with torch.no_grad():
            rows = trunk.model(
                tokens[:, : known - 1], use_cache=False, return_shared_kv_states=True
            )
        state, loss = rows.last_hidden_state[:, -1:], torch.zeros(())
        for j in range(2):
            newest = tokens[:, known - 1 + j, None]
            out = head(
                inputs_embeds=torch.cat([embed(newest), state], dim=-1),
                position_ids=torch.tensor([[known - 1]]),
                shared_kv_states=rows.shared_kv_states,
            )
            state = out.last_hidden_state
            wanted = follow(tokens[:, known - 3 + j : known + j])
            loss = loss + cross_entropy(out.logits, wanted) / 2
        return loss

    train(head.parameters(), measure, lambda: token.mul_(1 - hidden))
