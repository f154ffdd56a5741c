"""One run of an engine's programs, so that no request waits for lazy loading."""

from collections.abc import Iterable
from typing import cast

import numpy as np

from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import Adaptive, Programs
from mtpbuild.runtime.requests.step_controls import make_step_controls
from mtpbuild.runtime.sampling.params import SamplingParams

PROMPT = 8  # tokens


def warm_up(programs: Programs, manifest: Manifest, each: Iterable[SamplingParams]) -> None:
    """Fill in a short prompt and run a step, for requests with each of these settings.

    An adaptive engine runs a step with each nextn, as each is a program of its own. The slot is
    free afterwards; the next request begins in it as in any other.
    """
    build = manifest.build
    length = min(PROMPT, build.prefill_chunk, build.max_seq_len - 1)
    active = np.arange(build.slots) == 0
    for params in each:
        programs.prefill(0, 0, np.zeros(length + programs.lookahead, np.int64))
        for nextn in range(build.nextn + 1) if build.adaptive else (None,):
            if nextn is not None:
                cast(Adaptive, programs).draft(nextn)
            programs.begin(0, length, 0, make_step_controls([0], params, manifest))
            programs.step(active, length + manifest.window)
