"""Ranks that share a model say what the undivided model says; here they are threads."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtpbuild.builder.models.common import causal_lm, collectives, layers
from mtpbuild.builder.models.common.plain import PlainCausalLM, PlainLM
from mtpbuild.builder.models.common.weight import WHOLE, Share, StoredTensor
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config
from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.models.deepseek_v3.weights import weight_table
from mtpbuild.builder.models.ranks import check_ranks
from mtpbuild.builder.plan.plan import DrafterName, Plan
from mtpbuild.builder.plan.recipe import find_recipe_folder
from mtpbuild.plugins.accept_rewind import op
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.ranks import Ranks
from tests.reference.eager import EagerPrograms
from tests.reference.recompute import greedy
from tests.support.checkpoints import BASE, SHAPES, load_config, lower, make_predictable
from tests.support.families import CHOOSERS, make_family
from tests.support.forced import Run

CHUNK = 4
EVEN: dict[str, Any] = {"vocab_size": 64}
HEADS = {"vocab_size": 62, "num_attention_heads": 4, "num_key_value_heads": 4}
Case = tuple[str, dict[str, int], Ranks, DrafterName]
CASES: list[Case] = [
    ("yarn-three-modules", EVEN, Ranks(2), "mtp-eagle"),
    ("yarn-three-modules", EVEN, Ranks(2, 2), "mtp-vanilla"),
    ("no-q-lora-one-module", EVEN, Ranks(4, 2), "mtp-eagle"),  # gathered experts
    # Whole groups of heads, a rank's own rows of keys and values, and states
    ("glm-4.6", {"vocab_size": 62}, Ranks(2, 2), "mtp-eagle"),
    ("qwen3.5-moe", {"vocab_size": 62}, Ranks(2, 2), "mtp-eagle"),
    # Half of the heads and a whole indexer
    ("deepseek-v3.2", HEADS, Ranks(2, 2), "mtp-eagle"),
]
FULL: list[Case] = [
    ("yarn-three-modules", EVEN, Ranks(2), "mtp-vanilla"),
    ("yarn-three-modules", EVEN, Ranks(4, 2), "mtp-vanilla"),
    ("yarn-three-modules", EVEN, Ranks(4, 4), "mtp-eagle"),
    ("no-q-lora-one-module", EVEN, Ranks(4), "mtp-eagle"),
    ("no-q-lora-one-module", EVEN, Ranks(2, 2), "mtp-eagle"),
    ("glm-air", {"vocab_size": 62}, Ranks(2), "mtp-vanilla"),
    ("mimo", {"vocab_size": 62}, Ranks(2), "mtp-eagle"),
    ("qwen3-next", {"vocab_size": 64}, Ranks(2), "mtp-eagle"),
    ("glm-5", HEADS, Ranks(2, 2), "mtp-eagle"),
]


class Meeting:
    """A stand-in for collectives: ranks are threads."""

    def __init__(self, ranks: int) -> None:
        self.here, self.given = threading.local(), [torch.zeros(0)] * ranks
        self.barrier = threading.Barrier(ranks)
        self.last_axes = set[int]()  # of what was exchanged

    def exchange(self, x: Tensor) -> list[Tensor]:
        self.given[self.here.rank] = x
        self.last_axes.add(x.shape[-1])
        self.barrier.wait(60)
        everyone = list(self.given)
        self.barrier.wait(60)
        return everyone

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.exchange(x)).sum(0)

    @contextlib.contextmanager
    def of(self, *modules: ModuleType) -> Iterator[None]:
        """Let what these modules sum be summed here."""
        with pytest.MonkeyPatch.context() as patch:
            for module in modules:
                patch.setattr(module, "all_reduce", self.all_reduce)
            yield


Said = list[tuple[list[int], dict[str, Any]]]


def answers(
    reference: PlainCausalLM,
    ranks: Ranks,
    drafter: DrafterName,
    prompts: list[list[int]],
    meeting: Meeting,
) -> Said:
    """Return each rank's tokens after its prompt, and its state in the end."""
    torch.set_num_threads(1)

    def rank(number: int) -> tuple[list[int], dict[str, Any]]:
        meeting.here.rank = number
        plan = Plan(reference.config, 2, drafter, 1, 200, CHUNK)
        if not isinstance(reference, PlainDeepseek):
            plan = replace(plan, ranks=ranks)
        programs = EagerPrograms(plan, lower(reference, Share(ranks, number)))
        return generate(programs, reference, prompts[number], 12), programs.state

    modules = () if ranks.attention_dp else (causal_lm, layers)
    with meeting.of(*modules, collectives), ThreadPoolExecutor(ranks.tp) as pool:
        found = list(pool.map(rank, range(ranks.tp)))
    for prompt, (tokens, _) in zip(prompts, found, strict=True):
        assert tokens == greedy(reference, prompt, len(tokens))
    return found


@pytest.mark.parametrize(
    ("name", "sizes", "ranks", "drafter"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)],
)
def test_tokens_and_state(
    name: str, sizes: dict[str, int], ranks: Ranks, drafter: DrafterName
) -> None:
    """O2 for every rank; latent rows are the same bits on all."""
    latent = name in SHAPES or name in CHOOSERS
    reference: PlainCausalLM = (
        make_predictable(**SHAPES[name] | sizes) if name in SHAPES else make_family(name, **sizes)
    )
    rng = np.random.default_rng(ranks.tp if name in SHAPES else 0)
    length = 17 if name in CHOOSERS else 7
    prompt = rng.integers(0, sizes["vocab_size"], length).tolist()
    (_, first), *others = answers(reference, ranks, drafter, [prompt] * ranks.tp, Meeting(ranks.tp))
    for _, state in others if latent else []:
        for key, tensor in state.items():
            np.testing.assert_array_equal(tensor, first[key])


@pytest.mark.parametrize("block", [7, 4096])
def test_greedy_ranks_exchange_their_best_logits(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O2 without whole rows of logits; a rank may have several blocks of them."""
    monkeypatch.setattr(op, "BLOCK", block)
    sizes = SHAPES["yarn-three-modules"] | {"vocab_size": 258}  # wider than hidden states
    prompt, meeting = np.random.default_rng(0).integers(0, 258, 7).tolist(), Meeting(2)
    answers(make_predictable(**sizes), Ranks(2), "mtp-eagle", [prompt] * 2, meeting)
    assert max(meeting.last_axes) < 258
    assert 2 * 5 * -(-129 // block) in meeting.last_axes


@pytest.mark.parametrize(
    ("tp", "ep", "shape", "drafter"),
    [
        (2, 2, "yarn-three-modules", "mtp-vanilla"),
        (2, 1, "no-q-lora-one-module", "mtp-eagle"),  # gathered experts
        (3, 3, "ragged-no-interleave", "mtp-vanilla"),  # 3 heads, no vocabulary of 3 parts
        pytest.param(2, 1, "yarn-three-modules", "mtp-eagle", marks=pytest.mark.full),
        pytest.param(4, 2, "yarn-three-modules", "mtp-eagle", marks=pytest.mark.full),
        pytest.param(4, 2, "no-q-lora-one-module", "mtp-eagle", marks=pytest.mark.full),
    ],
)
def test_attention_dp(tp: int, ep: int, shape: str, drafter: DrafterName) -> None:
    """Each rank has a request of its own; they meet in the routed experts alone.

    `said` compares every rank's tokens with the plain model's.
    """
    prompts = np.random.default_rng(tp).integers(0, 61, (tp, 7)).tolist()
    ranks = Ranks(tp, ep, attention_dp=True)
    found = answers(make_predictable(**SHAPES[shape]), ranks, drafter, prompts, Meeting(tp))
    assert len({tuple(tokens) for tokens, _ in found}) == tp, "each says what is its own"


def generate(
    programs: EagerPrograms, reference: PlainLM, prompt: list[int], steps: int
) -> list[int]:
    rng = np.random.default_rng(0)
    Run(programs, reference, 2, None, CHUNK, rng).prefill(prompt)
    tokens, counts = list[int](), set[int]()
    for _ in range(steps):
        output = programs.step(np.array([True]), 0)
        count = int(output.num_tokens[0])
        tokens += output.tokens[0, :count].tolist()
        counts.add(count)
    assert len(counts) > 1, "drafts were accepted, and rejected"
    return tokens


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (4, 2), (4, 4)])
def test_every_weight_is_somewhere_once(tp: int, ep: int) -> None:
    """Every weight is replicated or cut, and the ranks' pieces are the checkpoint's tensors."""
    c = DeepseekV3Config.parse(BASE | EVEN)
    shares = [Share(Ranks(tp, ep), rank) for rank in range(tp)]
    held: dict[str, list[Tensor]] = {}
    for share in shares:
        sources = {s.name: s for weight in weight_table(c, share) for s in weight.stored}
        for source in sources.values():
            if source.axis is not None:
                numbers = torch.arange(int(np.prod(source.shape))).view(source.shape)
                held.setdefault(source.name, []).append(share.cut(source, numbers).flatten())
    cut = [s for weight in weight_table(c, WHOLE) for s in weight.stored if s.axis is not None]
    assert {source.name for source in cut} == set(held)
    for source in cut:
        found = torch.cat(held[source.name]).sort().values
        assert torch.equal(found, torch.arange(int(np.prod(source.shape)))), source.name
    replicated = {s.name for w in weight_table(c, WHOLE) for s in w.stored if s.axis is None}
    kinds = {name.rpartition("layers.")[2].partition(".")[2] or name for name in replicated}
    assert " ".join(sorted(kinds)) == (
        "enorm.weight hnorm.weight input_layernorm.weight mlp.gate.e_score_correction_bias "
        "mlp.gate.weight norm.weight post_attention_layernorm.weight "
        "self_attn.kv_a_layernorm.weight self_attn.kv_a_proj_with_mqa.weight "
        "self_attn.q_a_layernorm.weight self_attn.q_a_proj.weight shared_head.norm.weight"
    )


@pytest.mark.parametrize("experts", [8, 24])
def test_with_attention_dp_only_routed_experts_are_cut(experts: int) -> None:
    c = DeepseekV3Config.parse(BASE | {"n_routed_experts": experts})
    share = Share(Ranks(4, 2, attention_dp=True), 3)
    cut, seen = set[str](), set[str]()
    for source in (s for weight in weight_table(c, share) for s in weight.stored):
        tensor = torch.empty(source.shape, device="meta")
        seen.add(source.name)
        if share.cut(source, tensor).shape != source.shape:
            cut.add(source.name)
    everything = {s.name for weight in weight_table(c, WHOLE) for s in weight.stored}
    routed = {name for name in everything if ".mlp.experts." in name}
    assert cut == {n for n in routed if int(n.split(".")[5]) in share.experts(c.n_routed_experts)}
    assert seen == everything - routed | cut


def test_what_attention_dp_can_share() -> None:
    """Heads and vocabulary set no limit."""
    c = DeepseekV3Config.parse(BASE | {"n_routed_experts": 6, "n_group": 1, "topk_group": 1})
    check_ranks(c, Ranks(3, 3, attention_dp=True))
    check_ranks(c, Ranks(16, attention_dp=True))
    with pytest.raises(UsageError, match="--tp 3 does not divide moe_intermediate_size 16; poss"):
        check_ranks(c, Ranks(3, attention_dp=True))
    with pytest.raises(UsageError, match="--ep 4 does not divide both --tp 4 and the 6 routed"):
        check_ranks(c, Ranks(4, 4, attention_dp=True))


@pytest.mark.parametrize(
    ("tp", "ep", "says"),
    [
        (3, 1, "--tp 3 does not divide num_attention_heads 4; possible: 1, 2, 4$"),
        (0, 1, "--tp 0 is outside 1..64"),
        (4, 3, "--ep 3 does not divide both --tp 4 and the 8 routed experts; possible: 1, 2, 4"),
        (2, 4, "--ep 4 does not divide both --tp 2 and the 8 routed experts; possible: 1, 2"),
        (8, 2, "--tp 8 does not divide num_attention_heads 4; possible: 2, 4"),
    ],
)
def test_what_can_not_be_shared(tp: int, ep: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_ranks(DeepseekV3Config.parse(BASE | EVEN), Ranks(tp, ep))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": 61}, "--tp 2 does not divide vocab_size 61; possible: 1$"),
        ({"intermediate_size": 45}, "--tp 2 does not divide intermediate_size 45; possible: 1$"),
        (
            {"moe_intermediate_size": 15, "n_shared_experts": 2},
            "--tp 2 does not divide moe_intermediate_size 15; possible: 1$",
        ),
        (
            {"moe_intermediate_size": 15},
            "--tp 2 does not divide moe_intermediate_size x n_shared_experts 15; possible: 1$",
        ),
    ],
)
def test_sizes_that_do_not_split(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_ranks(DeepseekV3Config.parse(BASE | EVEN | changes), Ranks(2))


def test_deepseek_v3_on_eight_ranks() -> None:
    """The sizes of what each of eight ranks holds, counted by hand."""
    c = load_config(find_recipe_folder() / "deepseek_v3")
    for ep in (1, 2, 4, 8):
        check_ranks(c, Ranks(8, ep))
    share = Share(Ranks(8, 8), 3)
    assert share.experts(c.n_routed_experts) == range(96, 128)
    gate = StoredTensor("gate", (2048, 7168), axis=0, routed=True)
    for ranks, inner in ((Ranks(8, 8), 2048), (Ranks(8, 2), 512)):
        part = Share(ranks, 3).cut(gate, torch.empty(gate.shape, device="meta"))
        assert part.shape == (inner, 7168)
