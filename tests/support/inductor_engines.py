"""The shape, the requests and the checks that tests of inductor engines share."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.plan.plan import DrafterName
from mtpbuild.builder.program.trace import TracedProgram
from mtpbuild.builder.targets.inductor import lowering
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.controls import StepControls
from tests.reference.recompute import greedy
from tests.reference.sampling import sample
from tests.support.checkpoints import SMALLEST

CHUNK, NEXTN, SLOTS = 4, 2, 3
# One layer and one module; too many rotary frequencies to be written into the code.
SHAPE: dict[str, Any] = SMALLEST | {"qk_rope_head_dim": 20}
GREEDY = SamplingParams(max_tokens=25, ignore_eos=True)
HOT = replace(GREEDY, temperature=0.8, top_p=0.95, seed=5)
ENGINES: list[tuple[int, DrafterName | None]] = [(0, None), (3, "mtp-eagle"), (3, "mtp-vanilla")]


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 61, n).tolist() for n in lengths]


def check_texts(engine: Path, reference: PlainDeepseek) -> None:
    """Check O2 and O7, greedy and sampled, while requests join and leave a batch at any step."""
    asked = prompts(140, 1, 6, 2, 11, 3)
    params = [replace(GREEDY, max_tokens=n) for n in (5, 30, 17)]
    params += [HOT, replace(HOT, temperature=1.3, top_k=9, max_tokens=30), replace(HOT, min_p=0.1)]
    with Engine.load(engine, threads=1, prefix_cache=False) as loaded:
        results = loaded.generate(asked, params)
    for prompt, each, result in zip(asked, params, results, strict=True):
        if each.temperature:
            wanted = sample(reference, prompt, each.max_tokens, controls(each))
        else:
            wanted = greedy(reference, prompt, each.max_tokens)
        assert result.token_ids == wanted


def controls(params: SamplingParams) -> StepControls:
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    return StepControls(**{name: getattr(params, name) for name in names})


@contextlib.contextmanager
def compiled_with(option: str, value: str) -> Iterator[None]:
    """Give AOTInductor another option in place of target inductor's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(lowering.OPTIONS, option, value)
        yield


def compiled_soon() -> contextlib.AbstractContextManager[None]:
    """Compile the code that calls the kernels without optimisation, in half the time."""
    return compiled_with("aot_inductor.compile_wrapper_opt_level", "O0")


def touch(traced: TracedProgram, weights: object, folder: Path) -> str:
    (folder / f"{traced.name}.pt2").touch()
    return f"{traced.name}.pt2"
