"""Plants a bug, named in the environment, in a rank that another process has started.

Most make the order of that rank's collectives differ from the other ranks'.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from mtpbuild.runtime.contract.programs import MIXED, PLAIN
from mtpbuild.runtime.gpu.torch_cuda import Work
from mtpbuild.runtime.programs import inductor_cuda
from mtpbuild.runtime.programs.host_slots import HostSlots
from mtpbuild.runtime.programs.inductor_cuda import CudaPrograms, CudaRankPrograms

BUG = "FAKE_GPU_BUG"


def captures_in_another_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inductor_cuda, "PLAIN", MIXED)
    patch.setattr(inductor_cuda, "MIXED", PLAIN)


def captures_nothing(patch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Work] = CudaPrograms._prepare

    def prepare(self: CudaPrograms, work: Work, graphs: bool) -> Work:
        queue = real(self, work, False)
        queue()  # once, as on the other ranks
        self._wait(self._gpu.mark())
        return queue

    patch.setattr(CudaPrograms, "_prepare", prepare)


def computes_one_slot_more(patch: pytest.MonkeyPatch) -> None:
    """Plant a rank that chooses only by its own slots."""
    real: Callable[..., tuple[str, int]] = CudaPrograms._choose

    def choose(self: CudaRankPrograms, *slots: Any) -> tuple[str, int]:
        program, needed = real(self, *slots)
        return program, min(needed + 1, self._batch)

    patch.setattr(CudaPrograms, "_choose", choose)


def runs_prompts_behind_steps(patch: pytest.MonkeyPatch) -> None:
    """Queue chunks of prompts after a step."""
    prefill: Callable[..., None] = CudaRankPrograms.prefill
    launch: Callable[..., Any] = CudaRankPrograms.launch
    waiting = list[Callable[[], None]]()

    def later(self: CudaRankPrograms, *given: Any) -> None:
        waiting.append(partial(prefill, self, *given))

    def first(self: CudaRankPrograms, *given: Any) -> Any:
        land = launch(self, *given)
        while waiting:
            waiting.pop(0)()
        return land

    patch.setattr(CudaRankPrograms, "prefill", later)
    patch.setattr(CudaRankPrograms, "launch", first)


def loads_no_rows(patch: pytest.MonkeyPatch) -> None:
    """Begin a prompt behind whatever the slot holds."""
    patch.setattr(HostSlots, "load_rows", lambda self, slot, pieces: None)


UNLUCKY = 13  # the last token of a prompt that can't begin


def fails_at_requests(patch: pytest.MonkeyPatch) -> None:
    """Raise as the host begins an unlucky request, and as it keeps the first rows."""
    begin: Callable[..., None] = HostSlots.begin
    save: Callable[..., bool] = HostSlots.save_rows
    failed = list[bool]()

    def begin_or_fail(self: HostSlots, slot: int, length: int, newest: int, *given: Any) -> None:
        if newest == UNLUCKY:
            raise MemoryError("no memory left")
        begin(self, slot, length, newest, *given)

    def save_or_fail(self: HostSlots, *given: Any) -> bool:
        if not failed:
            failed.append(True)
            raise MemoryError("no memory left")
        return save(self, *given)

    patch.setattr(HostSlots, "begin", begin_or_fail)
    patch.setattr(HostSlots, "save_rows", save_or_fail)


BUGS = (
    captures_in_another_order, captures_nothing, computes_one_slot_more, runs_prompts_behind_steps,
    loads_no_rows, fails_at_requests,
)  # fmt: skip


@contextlib.contextmanager
def planted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for bug in BUGS:
            if bug.__name__ == os.environ.get(BUG):
                bug(patch)
        yield
