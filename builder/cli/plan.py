"""The command `plan`."""

from pathlib import Path
from typing import Annotated

import typer

from mtpbuild.runtime.cli import error_line
from mtpbuild.runtime.errors import UsageError


@error_line
def plan(
    model: Annotated[str, typer.Option(help="Recipe name (needs no weights) or checkpoint.")],
    nextn: Annotated[
        str, typer.Option(help="Draft tokens per step: a number, 0,1,3 or 0..5.")
    ] = "0..5",
    gpu: Annotated[str, typer.Option(help="h100, h200 or b200.")] = "b200",
    tp: Annotated[int, typer.Option(help="GPUs that the model is split over.")] = 1,
    ep: Annotated[int, typer.Option(help="Groups of GPUs that hold whole experts.")] = 1,
    attention_dp: Annotated[
        bool, typer.Option("--attention-dp", help="Attention whole on every GPU, requests split.")
    ] = False,
    max_seq_len: Annotated[
        int, typer.Option(help="Prompt and output tokens of a request together.")
    ] = 4096,
    max_batch: Annotated[int, typer.Option(help="Requests that run at once.")] = 1,
    context_len: Annotated[
        int, typer.Option(help="Cached tokens that a step reads per request.")
    ] = 2048,
    kv_cache: Annotated[str, typer.Option(help="Number format of the caches: bf16 or fp8.")] = (
        "bf16"
    ),
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens per prefill call.")] = 256,
    acceptance: Annotated[
        str | None,
        typer.Option(help="Acceptance length for each nextn: 1,1.92. Default: R1's published."),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(help="Your tokens/s of one user at two nextn: 0=111,1=198."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder with the recipe's weights.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Write the figures as a PNG too.")] = None,
    json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Foretell sizes, step times and speed of a model on GPUs that need not be here."""
    from mtpbuild.builder.build import needs

    with needs("build", "torch", "safetensors"):
        from mtpbuild.builder.forecast.forecast import ForecastRequest, forecast
        from mtpbuild.builder.forecast.latency import parse_measured
        from mtpbuild.builder.forecast.ranks import Ranks
        from mtpbuild.builder.forecast.report import as_json, print_report

    if picture is not None:
        from mtpbuild.builder.picture import require_matplotlib

        require_matplotlib()
    request = ForecastRequest(
        model=model,
        nextn=parse_nextn(nextn),
        gpu=gpu,
        ranks=Ranks(tp, ep, attention_dp),
        max_seq_len=max_seq_len,
        max_batch=max_batch,
        context=context_len,
        cache=kv_cache,
        prefill_chunk=prefill_chunk,
        acceptance=None if acceptance is None else parse_lengths(acceptance),
        measured=None if calibrate is None else parse_measured(calibrate),
        checkpoint=checkpoint,
    )
    done = forecast(request)
    if picture is not None:
        from mtpbuild.builder.forecast.picture import draw

        try:
            draw(done, picture)
        except (OSError, ValueError) as error:  # a place or an ending that can't be written
            raise UsageError(f"--picture {picture}: can't be written ({error})") from None
    if json:
        import json as writer

        typer.echo(writer.dumps(as_json(done), indent=1))
    else:
        print_report(done)


def parse_nextn(text: str) -> tuple[int, ...]:
    """`3`, `0,1,3` or `0..5`, in rising order."""
    from mtpbuild.builder.cli.numbers import parse_numbers

    first, dots, last = text.partition("..")
    if not dots:
        return tuple(sorted(set(parse_numbers("--nextn", text))))
    low, high = parse_numbers("--nextn", f"{first},{last}")
    if not 0 <= low <= high <= 99:
        raise UsageError(f"--nextn {text}: the range must rise from 0 or more")
    return tuple(range(low, high + 1))


def parse_lengths(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--acceptance {text!r} is not a list such as 1,1.92,2.58") from None
