"""Groups of flags: what is in them, and that a command gets them as values."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from mtpbuild.builder.cli import app
from mtpbuild.runtime.cli.sampling_flags import RunFlags, SamplingFlags, make_sampling_params
from mtpbuild.runtime.errors import RequestError, UsageError
from mtpbuild.runtime.flag_groups import flag, group_flags

SHARED = {
    "--acceptance", "--config", "--extra-llm-api-options", "--min-p", "--relaxed-delta",
    "--rejection-sample-method", "--relaxed-topk", "--seed", "--spec-decode-algo",
    "--spec-decode-max-draft-len", "--spec-decode-nextn", "--synthetic-acceptance-length",
    "--synthetic-acceptance-rates", "--speculative-config", "--temperature", "--top-k", "--top-p",
    "--use-relaxed-acceptance-for-thinking",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Size:
    width: int = flag(3, "In cm.", "--width", "-w")
    deep: bool = flag(False, "Whether it is deep.")


def test_a_group_is_a_parameter_of_the_command() -> None:
    seen = []

    @group_flags
    def paint(
        name: Annotated[str, typer.Argument()],
        size: Size,
        times: Annotated[int, typer.Option()] = 1,
    ) -> None:
        """Paints."""
        seen.append((name, size, times))

    one = typer.Typer()
    one.command()(paint)
    assert CliRunner().invoke(one, ["door"]).exit_code == 0
    assert CliRunner().invoke(one, ["wall", "-w", "5", "--times", "2", "--deep"]).exit_code == 0
    assert seen == [("door", Size(), 1), ("wall", Size(width=5, deep=True), 2)]
    assert CliRunner().invoke(one, ["wall", "--width", "x"]).exit_code == 2
    shown = CliRunner().invoke(one, ["--help"]).stdout
    assert "Paints." in shown
    assert "In cm." in shown


@pytest.mark.parametrize("command", ["run", "bench"])
def test_the_shared_flags(command: str) -> None:
    options = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    assert {name for option in options for name in option.opts} >= SHARED


def test_params_are_those_of_flags_and_configuration() -> None:
    flags = SamplingFlags(temperature=0.6, top_k=5, top_p=0.9, min_p=0.1, seed=4)
    params = make_sampling_params(flags, {"rejection_sample_method": "standard"}, max_tokens=7)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 5, 0.9, 0.1)
    assert (params.seed, params.acceptance, params.max_tokens) == (4, "rejection", 7)
    assert make_sampling_params(SamplingFlags(acceptance="rejection"), {}).acceptance != "strict"
    with pytest.raises(UsageError, match="--acceptance strict contradicts"):
        make_sampling_params(
            SamplingFlags(acceptance="strict"), {"rejection_sample_method": "standard"}
        )
    rates = SamplingFlags(rejection_sample_method="synthetic", synthetic_acceptance_rates="0.9,0.5")
    output = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": (0.9, 0.5)}
    for each in (make_sampling_params(rates, {}), make_sampling_params(rates, output)):
        assert (each.synthetic, each.synthetic_acceptance_rates) == (True, (0.9, 0.5))
    with pytest.raises(UsageError, match=r"synthetic contradicts .* block"):
        make_sampling_params(rates, {"rejection_sample_method": "block"})
    penalties = RunFlags(presence_penalty=1.5, logit_bias='{"5": -100}')
    edits = make_sampling_params(SamplingFlags(), {}, **vars(penalties))
    assert (edits.presence_penalty, edits.repetition_penalty) == (1.5, 1)
    assert edits.logit_bias == {5: -100}
    with pytest.raises(RequestError, match="temperature must be"):
        make_sampling_params(SamplingFlags(temperature=-1), {})
