"""The command `plan`."""

from pathlib import Path
from typing import Annotated

from typer import Option

from mtpbuild.builder.cli.shared import RankFlags, parse_range, show
from mtpbuild.runtime.cli import error_line
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.flag_groups import grouped, parse_list


@error_line
@grouped
def plan(
    model: Annotated[str, Option(help="Recipe name (needs no weights) or checkpoint.")],
    ranks: RankFlags,
    nextn: Annotated[str, Option(help="Draft tokens per step: a number, 0,1,3 or 0..5.")] = "0..5",
    gpu: Annotated[str, Option(help="h100, h200 or b200.")] = "b200",
    max_seq_len: Annotated[
        int, Option(help="Prompt and output tokens of a request together.")
    ] = 4096,
    max_batch: Annotated[int, Option(help="Requests that run at once.")] = 1,
    context_len: Annotated[int, Option(help="Cached tokens that a step reads per request.")] = 2048,
    kv_cache: Annotated[str, Option(help="Number format of the caches: bf16 or fp8.")] = ("bf16"),
    prefill_chunk: Annotated[int, Option(help="Prompt tokens per prefill call.")] = 256,
    acceptance: Annotated[
        str | None,
        Option(help="Acceptance length for each nextn: 1,1.92. Default: R1's published."),
    ] = None,
    calibrate: Annotated[
        str | None, Option(help="Your tokens/s of one user at two nextn: 0=111,1=198.")
    ] = None,
    checkpoint: Annotated[Path | None, Option(help="Folder with the recipe's weights.")] = None,
    picture: Annotated[Path | None, Option(help="Write the figures as a PNG too.")] = None,
    json: Annotated[bool, Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Foretell sizes, step times and speed of a model on GPUs that need not be here."""
    from mtpbuild.builder.checks import needs

    with needs("build", "torch", "safetensors"):
        from mtpbuild.builder.forecast.forecast import ForecastRequest, forecast
        from mtpbuild.builder.forecast.latency import parse_measured
        from mtpbuild.builder.forecast.report import as_json, draw, print_report
        from mtpbuild.builder.picture import require_matplotlib

    if picture is not None:
        require_matplotlib()
    lengths = None
    if acceptance is not None:
        lengths = parse_list("--acceptance", acceptance, float, "1,1.92,2.58")
    request = ForecastRequest(
        model=model,
        nextn=parse_range(nextn),
        gpu=gpu,
        ranks=ranks.ranks(),
        max_seq_len=max_seq_len,
        max_batch=max_batch,
        context_len=context_len,
        kv_cache=kv_cache,
        prefill_chunk=prefill_chunk,
        acceptance=lengths,
        measured=None if calibrate is None else parse_measured(calibrate),
        checkpoint=checkpoint,
    )
    done = forecast(request)
    if picture is not None:
        try:
            draw(done, picture)
        except (OSError, ValueError) as error:  # a place or an ending that can't be written
            raise UsageError(f"--picture {picture}: can't be written ({error})") from None
    show(json, as_json(done), lambda: print_report(done))
