"""The GPU's run time on a GPU that is not there: order, graphs, overlap, refusals, tokens.

Programs run eagerly here, on a `FakeGpu` that does nothing before it is waited for. What a GPU
computes is tests/gpu/test_inductor.py's business.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.plan.plan import DrafterName, Plan
from mtpbuild.builder.program.programs import make_programs
from mtpbuild.runtime import Engine, EngineError
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import PREFILL, PrefixCaching
from mtpbuild.runtime.errors import NotFiniteError
from mtpbuild.runtime.gpu.torch_cuda import Gpu
from mtpbuild.runtime.prefix_cache.cache import PrefixCache
from mtpbuild.runtime.programs import inductor_cuda
from mtpbuild.runtime.programs.inductor_cuda import CudaPrograms
from tests.reference.recompute import greedy
from tests.reference.sampling import check_alone, check_texts
from tests.support.checkpoints import lower
from tests.support.eager_package import EagerPackage, manifest_of
from tests.support.fake_gpu import FakeGpu, opened, torch_finds
from tests.support.forced import check_programs
from tests.support.inductor_engines import GREEDY, HOT, prompts
from tests.support.styles import style_of

CHUNK, SLOTS = 4, 3


MakePrograms = Callable[..., tuple[CudaPrograms, Manifest, FakeGpu]]


ON_GPU = style_of("inductor", device="cuda")


def never(device: str) -> Callable[[str], EagerPackage]:
    raise AssertionError("nothing is opened")


@pytest.fixture
def on_gpu(predictable: PlainDeepseek) -> MakePrograms:
    """on_gpu(nextn, drafter, slots, graphs) -> programs, their manifest and their GPU."""

    def make(
        nextn: int = 3, drafter: DrafterName | None = "mtp-eagle", slots: int = SLOTS, **how: bool
    ) -> tuple[CudaPrograms, Manifest, FakeGpu]:
        plan = Plan(predictable.config, nextn, drafter, slots, 200, CHUNK, ON_GPU)
        programs = make_programs(plan, lower(predictable))
        packages = {p.name: EagerPackage(p) for p in programs}
        manifest, gpu = manifest_of(plan, programs), FakeGpu()
        loaded = CudaPrograms(manifest, gpu, opened(packages), **how)  # type: ignore[arg-type]
        return loaded, manifest, gpu

    return make


@pytest.mark.parametrize(
    ("nextn", "drafter", "overlap", "ahead"),
    [
        (0, None, True, True),
        pytest.param(3, "mtp-eagle", True, False, marks=pytest.mark.full),
        (3, "mtp-vanilla", True, False),
        pytest.param(3, "mtp-eagle", False, False, marks=pytest.mark.full),
    ],
)
def test_texts_equal_plain_decoding(
    nextn: int,
    drafter: DrafterName | None,
    overlap: bool,
    ahead: bool,
    on_gpu: MakePrograms,
    predictable: PlainDeepseek,
) -> None:
    """O2 and O7: greedy and sampled, requests join and leave at any step, slots move."""
    programs, manifest, gpu = on_gpu(nextn, drafter)
    gpu.ahead = ahead
    asked = prompts(20, 1, 6, 2, 11)
    params = [replace(GREEDY, max_tokens=n) for n in (5, 16, 9)]
    params += [replace(HOT, max_tokens=8), replace(HOT, top_k=9, max_tokens=14)]
    engine = Engine(programs, manifest, overlap=overlap)
    check_texts(engine, predictable, asked, params)
    assert bool(gpu.queue) == (overlap and not ahead)  # the last step is one too many


@pytest.mark.full
@pytest.mark.parametrize("overlap", [True, False])
def test_prompts_begin_with_rows_of_earlier_ones(
    overlap: bool, on_gpu: MakePrograms, predictable: PlainDeepseek
) -> None:
    """The second turns of conversations, and one that comes while its beginning is answered."""
    programs, manifest, gpu = on_gpu(3, "mtp-vanilla")
    gpu.ahead = overlap
    cache = PrefixCache(cast(PrefixCaching, programs), manifest, 1 << 20)
    asked, params = prompts(20, 6, 35, 90), replace(GREEDY, max_tokens=12)
    with Engine(programs, manifest, overlap=overlap, prefix_cache=cache) as engine:
        for known in ([0] * 4, [len(prompt) + 12 - 3 for prompt in asked]):
            results = engine.generate(asked, params)
            for prompt, result in zip(asked, results, strict=True):
                assert result.token_ids == greedy(predictable, prompt, 12)
            assert [result.metrics.cached_tokens for result in results] == known
            turns = zip(asked, results, strict=True)
            asked = [[*prompt, *result.token_ids, 7, 9] for prompt, result in turns]
        running = engine.stream(prompts(97)[0], replace(GREEDY, max_tokens=90))
        next(running)
        late = engine.generate([*running._request.prompt[:80], 3, 4], params)
        assert not running._request.ended
        assert late.metrics.cached_tokens == 80 - 3
        assert late.token_ids == greedy(predictable, [*running._request.prompt[:80], 3, 4], 12)


def test_modes_share_a_batch(on_gpu: MakePrograms) -> None:
    programs, manifest, _ = on_gpu(3, "mtp-vanilla")
    asked, short = prompts(3, 5, 1, 9), replace(GREEDY, max_tokens=10)
    hot = replace(HOT, max_tokens=10)
    params = [hot, replace(hot, acceptance="rejection"), replace(short, logprobs=2), short]
    with Engine(programs, manifest) as engine:
        together = check_alone(engine, asked, params)
    assert together[2].logprobs is not None
    assert [entry.top[0][0] for entry in together[2].logprobs] == together[2].token_ids


def test_nan_ends_a_request_and_no_other(on_gpu: MakePrograms, predictable: PlainDeepseek) -> None:
    """The slot is used again afterwards, and nothing is left in it."""
    asked, short = prompts(40, 6, 5), replace(GREEDY, max_tokens=12)
    wanted = [greedy(predictable, prompt, 12) for prompt in asked]
    programs, manifest, gpu = on_gpu(3, "mtp-vanilla", 2)
    gpu.ahead = True
    engine = Engine(programs, manifest)
    first = engine.stream(asked[0], replace(short, max_tokens=99))
    second = engine.stream(asked[1], short)
    assert next(first).token_ids
    assert next(second).token_ids
    for name in ("kv.0", "past_hidden"):
        programs._state[name][0] = torch.nan
    with pytest.raises(NotFiniteError, match=r"after \d+ tokens .* are NaN or infinite"):
        first.result()
    assert second.result().token_ids == wanted[1]
    again = engine.generate(asked[1:] * 2, short)
    assert [result.token_ids for result in again] == wanted[1:] * 2
    assert not any(np.isnan(array).any() for array in programs.state.values())


@pytest.mark.parametrize(
    "drafter", [pytest.param("mtp-eagle", marks=pytest.mark.full), "mtp-vanilla"]
)
def test_every_step_equals_recomputation(
    drafter: DrafterName, on_gpu: MakePrograms, predictable: PlainDeepseek
) -> None:
    """O3, in a slot that held another request before."""
    programs, _, _ = on_gpu(3, drafter, slots=1)
    check_programs(programs, predictable, 3, drafter, CHUNK, (11, CHUNK + 1), count=4, every=False)


@pytest.mark.parametrize("graphs", [True, False])
def test_a_step_is_one_graph_and_one_wait(graphs: bool, on_gpu: MakePrograms) -> None:
    programs, manifest, gpu = on_gpu(graphs=graphs)
    assert gpu.captures == (2 * 3 if graphs else 0)  # both programs, for 1, 2 and 3 slots
    decode = list_slot_counts(programs, "decode")
    before = len(decode)
    engine, waits = Engine(programs, manifest), gpu.waits
    result = engine.generate(prompts(30)[0], replace(GREEDY, max_tokens=12))
    steps = result.metrics.speculative_decoding.num_spec_steps
    assert gpu.waits - waits == steps, "prefill and admission wait for nothing"
    gpu.synchronise()
    assert len(decode) - before == steps + 1
    assert gpu.replays == (steps + 1 if graphs else 0)


def list_slot_counts(programs: CudaPrograms, name: str) -> list[int]:
    package: object = programs._packages[name]
    assert isinstance(package, EagerPackage)
    return package.slots


def test_slots_that_run_are_computed(on_gpu: MakePrograms) -> None:
    programs, _, _ = on_gpu(0, None)
    sizes = list_slot_counts(programs, "decode")
    sizes.clear()
    for slot in range(SLOTS):
        programs.begin(slot, 0, 5 + slot)
    for active in ([1, 0, 0], [0, 1, 0], [1, 0, 1], [1, 0, 0]):
        output = programs.step(np.array(active, np.bool_), 1)
        assert output.num_tokens.tolist() == active
        assert (output.tokens[:, 0] >= 0).tolist() == [bool(x) for x in active]
    assert sizes == [1, 2, 3, 1]


def test_another_gpu_is_refused(on_gpu: MakePrograms, tmp_path: Path) -> None:
    _, manifest, _ = on_gpu()
    with pytest.raises(EngineError, match=r"compute capability 9.0, this one has 8.0; build it"):
        inductor_cuda.load(tmp_path, manifest, FakeGpu("8.0"), never)  # type: ignore[arg-type]


def test_too_little_memory_is_said_before_loading(on_gpu: MakePrograms, tmp_path: Path) -> None:
    programs, manifest, _ = on_gpu()
    held = programs._given.values()
    needed = 5 * 10**9 + sum(tensor.nbytes for tensor in held)
    gpu = FakeGpu(free=needed - 1)
    with pytest.raises(EngineError) as caught:
        inductor_cuda.load(tmp_path, manifest, gpu, never)  # type: ignore[arg-type]
    assert f"needs about {needed / 1e9:.2f} GB of GPU memory (weights 5.00, " in str(caught.value)
    assert f", {(needed - 1) / 1e9:.2f} GB are free; build with a smaller" in str(caught.value)
    assert not gpu._memory, "nothing was allocated"
    opener = opened(programs._packages)
    inductor_cuda.load(tmp_path, manifest, FakeGpu(free=needed), opener)  # type: ignore[arg-type]
    prompts = manifest.programs[PREFILL].model_copy(update={"temporary": 10**9})
    larger = manifest.model_copy(update={"programs": {**manifest.programs, PREFILL: prompts}})
    with pytest.raises(EngineError, match=r"intermediate results 1\.00\), "):
        inductor_cuda.load(tmp_path, larger, FakeGpu(free=needed), never)  # type: ignore[arg-type]


def test_memory_that_runs_out_is_one_line(on_gpu: MakePrograms, tmp_path: Path) -> None:
    _, manifest, _ = on_gpu()

    def fail(device: str) -> Callable[[str], EagerPackage]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nDetails")

    with pytest.raises(
        EngineError, match=r"too small \(CUDA out of memory.*GiB.\); build"
    ) as caught:
        inductor_cuda.load(tmp_path, manifest, FakeGpu(), fail)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_more_rows_than_there_are(on_gpu: MakePrograms) -> None:
    programs, manifest, _ = on_gpu()
    capacity = manifest.build.capacity
    assert capacity >= 200 + 2 * manifest.window
    assert capacity % 64 == 0
    with pytest.raises(EngineError, match=f"{capacity + 1} cache rows asked for, {capacity}"):
        programs.launch(np.ones(SLOTS, np.bool_), capacity + 1)


def test_a_full_slot_beside_a_running_one(on_gpu: MakePrograms, predictable: PlainDeepseek) -> None:
    """It runs up to max_seq_len, one step too many included."""
    programs, manifest, _ = on_gpu()
    asked = prompts(190, 3)
    params = [replace(GREEDY, max_tokens=n) for n in (1000, 20)]
    results = Engine(programs, manifest).generate(asked, params)
    for prompt, count, result in zip(asked, (10, 20), results, strict=True):
        assert result.token_ids == greedy(predictable, prompt, count)


def test_a_rank_uses_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads begin with the first one; and products in bfloat16 sum in fp32."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    products = torch.backends.cuda.matmul
    before = products.allow_bf16_reduced_precision_reduction
    with torch_finds(2):
        Gpu(1)
    assert chosen == [torch.device("cuda", 1)]
    assert before
    assert not products.allow_bf16_reduced_precision_reduction
    products.allow_bf16_reduced_precision_reduction = before


def test_what_a_program_would_copy_is_noticed(on_gpu: MakePrograms) -> None:
    programs, *_ = on_gpu()
    caches = {name: cache[0, 0, :8][None, None] for name, cache in programs._caches.tensors.items()}
    programs._fill_rows(caches, 1)
    caches["kv.0"] = caches["kv.0"].flatten()[1:].view(1, 1, 1, -1)
    with pytest.raises(AssertionError, match="a program would copy it"):
        programs._fill_rows(caches, 1)


def test_without_a_gpu() -> None:
    says = "no NVIDIA GPU can be used here: torch finds none"
    with torch_finds(0), pytest.raises(EngineError, match=says):
        Gpu()
