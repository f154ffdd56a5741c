"""Steps whose windows hold a known text, with each number of accepted drafts in turn."""

from collections.abc import Iterator

import numpy as np

from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.plan.plan import Plan
from tests.reference.eager import EagerPrograms


def take_steps(
    plan: Plan, model: CausalLM, tokens: list[int], truth: list[int], vocabulary: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Check what each step emits after a prompt; yield all tokens so far, and the step's drafts.

    truth: the tokens that follow the prompt, nextn + 1 for each step.
    """
    programs, last, nextn = EagerPrograms(plan, model), len(tokens) - 1, plan.nextn
    for start in range(0, last, plan.prefill_chunk):
        end = min(start + plan.prefill_chunk, last)
        programs.prefill(0, start, np.array(tokens[start : end + programs.lookahead]))
    programs.begin(0, last, tokens[-1])
    for step in range(len(truth) // (nextn + 1)):
        right = step % (nextn + 1) if step else 0
        window = programs.state["window"][0]
        window[1:] = truth[:nextn]
        if right < nextn:
            window[1 + right] = (window[1 + right] + 1) % vocabulary
        programs.state["num_drafts"][0] = nextn if step else 0
        out = programs.step(np.array([True]), plan.capacity)
        assert out.num_tokens[0] == right + 1
        assert out.tokens[0, : right + 1].tolist() == truth[: right + 1]
        tokens, truth = tokens + truth[: right + 1], truth[right + 1 :]
        yield tokens, programs.state["window"][0, 1:].tolist()
