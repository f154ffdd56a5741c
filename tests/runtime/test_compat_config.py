"""Settings of several sources: joined, compared, held against what there is."""

from typing import Any

import pytest

from mtpbuild.runtime.configuration.read import parse_speculative_config
from mtpbuild.runtime.configuration.settings import (
    Configuration,
    check_engine,
    join,
    list_relaxed_notes,
    name_source,
    read_requested_ranks,
    read_sampling_settings,
)
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.ranks import Ranks
from tests.support.fakes import fake_manifest


def test_the_first_key_that_is_not_supported_is_named() -> None:
    text = '{"disable_by_batch_size": 2, "speculative_token_tree": "x"}'
    with pytest.raises(UsageError, match=r"^--speculative-config: disable_by_batch_size 2 is"):
        parse_speculative_config(text)


@pytest.mark.parametrize(
    ("settings", "keywords"),
    [
        ({"nextn": 3}, {}),
        ({"relaxed_topk": 10, "relaxed_delta": 0.6}, {}),
        ({"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 10, "relaxed_delta": 0.6},
         {"relaxed_topk": 10, "relaxed_delta": 0.6}),
        ({"rejection_sample_method": "standard"},
         {"acceptance": "rejection", "rejection_sample_method": "standard"}),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": (1.0, 0.5)},
            {
                "acceptance": "rejection", "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": (1.0, 0.5),
            },
        ),
        ({"draft_sample_method": "greedy"}, {"draft_sample_method": "greedy"}),
    ],
)  # fmt: skip
def test_what_a_request_is_told(settings: Configuration, keywords: dict[str, object]) -> None:
    assert read_sampling_settings(settings) == keywords


def test_sources_are_joined() -> None:
    first = {"nextn": 3, "relaxed_topk": 4, "notes": ("a",)}
    second = {"nextn": 3, "use_relaxed_acceptance_for_thinking": True, "notes": ("b",)}
    assert join([]) == {}
    assert join([*name_source(first, "--one"), *name_source(second, "--two")]) == {
        "nextn": 3, "use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 4,
        "notes": ("a", "b"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("one", "two", "line"),
    [
        ({"nextn": 0}, {"nextn": 3}, "nextn: --one says 0, --two says 3; drop one"),
        ({"drafter": "mtp-eagle"}, {"drafter": "mtp-vanilla"},
         "drafter: --one says mtp-eagle, --two says mtp-vanilla; drop one"),
        ({"use_relaxed_acceptance_for_thinking": False},
         {"use_relaxed_acceptance_for_thinking": True},
         "use_relaxed_acceptance_for_thinking: --one says false, --two says true; drop one"),
    ],
)  # fmt: skip
def test_contradictions_name_both(one: Configuration, two: Configuration, line: str) -> None:
    with pytest.raises(UsageError) as caught:
        join([*name_source(one, "--one"), *name_source({}, "--none"), *name_source(two, "--two")])
    assert str(caught.value) == line


def test_relaxed_values_that_nothing_switches_on() -> None:
    given = {"relaxed_topk": 10, "end_thinking_phase_token": 7}
    assert list_relaxed_notes(given) == [
        "relaxed_topk: no effect without use_relaxed_acceptance_for_thinking",
        "end_thinking_phase_token: no effect without use_relaxed_acceptance_for_thinking",
    ]
    assert (
        list_relaxed_notes({"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 3}) == []
    )


def test_an_engine_is_what_it_is() -> None:
    build = fake_manifest(nextn=3).build
    assert build.drafter == "mtp-eagle"
    check_engine({}, build)
    check_engine({"nextn": 3, "drafter": "mtp-eagle"}, build)
    check_engine({"drafter": "mtp-vanilla"}, fake_manifest(nextn=0).build)
    with pytest.raises(UsageError, match="asks for nextn 2, the engine was built with nextn 3: le"):
        check_engine({"nextn": 2}, build)
    says = r"asks for drafter mtp-vanilla, .* built with drafter mtp-eagle: "
    with pytest.raises(UsageError, match=says):
        check_engine({"drafter": "mtp-vanilla"}, build)


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [({}, Ranks()), ({"tp": 8}, Ranks(8)),
     ({"tp": 8, "ep": 4, "attention_dp": True}, Ranks(8, 4, True)),
     ({"tp": 8, "moe_tp": 2}, Ranks(8, 4)),
     ({"tp": 8, "moe_tp": 2, "ep": 4, "attention_dp": False}, Ranks(8, 4))],
)  # fmt: skip
def test_ranks(settings: Configuration, ranks: Ranks) -> None:
    assert read_requested_ranks(settings) == ranks


def test_ranks_that_contradict() -> None:
    says = r"^moe_tensor_parallel_size 3 times --ep 2 must be --tp, "
    with pytest.raises(UsageError, match=says):
        read_requested_ranks({"tp": 8, "moe_tp": 3})
    build = fake_manifest().build.model_copy(update={"tp": 4, "ep": 2})
    check_engine({"tp": 4, "ep": 2, "moe_tp": 2, "attention_dp": False}, build)
    for name, wanted, built in (("tp", 8, 4), ("ep", 4, 2), ("moe_tp", 1, 2)):
        asked: dict[str, Any] = {name: wanted}
        says = f"asks for {name} {wanted}, the engine was built with {name} {built}: leave it out"
        with pytest.raises(UsageError, match=says):
            check_engine({**asked}, build)
    says = r"asks for attention_dp true, .* with attention_dp false:"
    with pytest.raises(UsageError, match=says):
        check_engine({"attention_dp": True}, build)
