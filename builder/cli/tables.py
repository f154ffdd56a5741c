"""The printed results of the building commands; it imports rich, so commands import it late."""

import contextlib
import sys
from json import dumps
from typing import TYPE_CHECKING, Any

from mtpbuild.builder.plan.recipe import load_recipes
from mtpbuild.builder.weights.scheme import AS_STORED
from mtpbuild.runtime.contract.manifest import list_ranks_here
from mtpbuild.runtime.files import format_size
from mtpbuild.runtime.tables import print_lines, print_table

if TYPE_CHECKING:
    from mtpbuild.builder.compiler.build import BuiltEngine
    from mtpbuild.builder.compiler.dry_run import DryRun, EngineForecast
    from mtpbuild.builder.compiler.quantize import Quantized
    from mtpbuild.builder.program.opened_model import OpenedModel
    from mtpbuild.builder.stages import Stages
    from mtpbuild.lab.forecast.fitting import FittingEngine


def print_recipes(json: bool) -> None:
    """Print a line for each model that can be built by name, or all fields of each as JSON."""
    recipes = load_recipes()
    if json:
        print(dumps([recipe.model_dump() for recipe in recipes], indent=1))
        return
    width = max(len(recipe.name) for recipe in recipes)
    for recipe in recipes:
        print(f"{recipe.name:{width}}  {recipe.summary}")


def print_fitting(fitting: list["FittingEngine"], bandwidth: float, json: bool) -> None:
    """Print a line for each recipe that fits this machine, or an object for each as JSON."""
    rows: list[dict[str, Any]] = [
        {
            "model": model.forecast.name,
            "weights": model.engine.weights or AS_STORED,
            "download_bytes": model.forecast.download,
            "engine_bytes": model.engine.bytes,
            "context": model.engine.context,
            "tokens_per_s": model.tokens_per_s,
        }
        for model in fitting
    ]
    if json:
        print(dumps(rows, indent=1))
        return
    table = [("model", "--weights", "download", "engine", "context", "tokens/s")]
    for row in rows:
        sizes = format_size(row["download_bytes"]), format_size(row["engine_bytes"])
        speed = f"{float(format(row['tokens_per_s'], '.3g')):,g}"
        table.append((row["model"], row["weights"], *sizes, f"{row['context']:,}", speed))
    print_table(table)
    print_lines(
        f"if a step did nothing but read, at {bandwidth / 1e9:.3g} GB/s (measured now); "
        "`mtpbuild plan --model NAME --cpu` says more, `mtpbuild run NAME` fetches and builds one"
    )


def print_engines(engines: list["BuiltEngine"]) -> None:
    """Print the engines with their sizes, and which of their ranks are here."""
    rows = [("engine", "nextn", "drafter", "files", "size", "status")]
    for engine in engines:
        build, files = engine.manifest.build, engine.list_file_sizes()
        status = "unchanged" if engine.unchanged else "built"
        sizes = str(len(files)), f"{sum(files) / 1e6:.1f} MB"
        rows.append((str(engine.folder), build.drafts, build.drafter or "-", *sizes, status))
    print_table(rows)
    print_lines(*{engine.formats: None for engine in engines if engine.formats})
    for engine in engines:
        ranks = list_ranks_here(engine.folder, engine.manifest)
        if engine.manifest.split and len(ranks) < engine.manifest.build.tp:
            here = ", ".join(map(str, ranks))
            print_lines(f"{engine.folder}: of {engine.manifest.build.tp} ranks here: {here}")


def print_dry_run(done: "DryRun") -> None:
    """Print what was read, then a line per engine."""
    _print_checkpoint(done.model)
    rows = [("engine", "nextn", "drafter", "weights", "state", "build")]
    for engine in done.engines:
        per_rank = " per rank" if engine.plan.ranks.tp > 1 else ""
        nextn = f"0 to {engine.plan.nextn}" if engine.plan.adaptive else str(engine.plan.nextn)
        weights = f"{engine.weight_file_bytes / 1e9:,.2f} GB {done.model.weights_type}{per_rank}"
        state = f"{engine.state_bytes / 1e9:,.3f} GB{per_rank}"
        status = "to do" if engine.new else "if changed"
        drafter = engine.plan.drafter or "-"
        rows.append((str(engine.folder), nextn, drafter, weights, state, status))
    print_table(rows)
    for engine in done.engines:
        _print_graphs(engine)
    for line in done.lacking:
        print_lines(f"can't be built here: {line}")
    print_lines("dry run: nothing was written")


def _print_checkpoint(model: "OpenedModel") -> None:
    """Print a checkpoint's size, and what an engine would change of its weights."""
    from mtpbuild.builder.compiler.notes import describe_formats
    from mtpbuild.builder.program.opened_model import describe_counts

    files = [entry.file for entry in model.stored.tensors.values()]
    print_lines(
        f"{model.source.folder}: {len(files):,} tensors in {len(set(files))} files, as "
        f"config.json demands; {model.table.parameters:,} parameters"
    )
    print_lines(describe_formats(model))
    if (scheme := model.scheme) is not None and scheme.main is not None:
        head = "would stay" if scheme.head is None else f"to {scheme.head}"
        print_lines(f"weights would be quantised to {scheme.main}; embedding and head {head}")
    if model.unfit:
        print_lines(f"{len(model.unfit):,} weights stay as they are: no block fits their columns")
    if counts := describe_counts(model.dequantised().elements()):
        print_lines(f"{counts} would be dequantised to {model.style.dtype}")
    if counts := describe_counts(model.rounded().values()):
        print_lines(f"{counts} would be rounded to {model.style.rounds_to}")


def _print_graphs(engine: "EngineForecast") -> None:
    """Print the sizes of an engine's graphs, weights, caches and intermediate results."""
    sizes = ", ".join(f"{name} {graph.nodes:,} nodes" for name, graph in engine.graphs.items())
    print_lines(f"{engine.folder}: exported without weights: {sizes}")
    rank = "each rank: " if engine.plan.ranks.tp > 1 else ""
    weights, loaded = format_size(engine.weight_file_bytes), format_size(engine.loaded_weight_bytes)
    programs = "" if loaded == weights else f", all programs together hold {loaded} of weights"
    temporary = format_size(max(graph.temporary for graph in engine.graphs.values()))
    print_lines(
        f"{engine.folder}: {rank}weights {weights}, caches {format_size(engine.cache_bytes)}"
        f"{programs}; intermediate results up to {temporary}"
    )


def print_stages(stages: "Stages") -> None:
    """Print the time of each stage, and the peak memory of all where the system reports it."""
    line = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in stages.seconds.items())
    with contextlib.suppress(ImportError):  # on Windows
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        line += f"; peak memory {peak / (1 << 20 if sys.platform == 'darwin' else 1 << 10):.0f} MiB"
    print_lines(line)


def print_quantized(done: "Quantized") -> None:
    """Print a line per format, then the weights that could not be quantised."""
    rows = [("format", "weights", "size", "relative error")]
    for name, portion in done.portions.items():
        error = f"{portion.loss.relative:.2%}" if portion.loss.squares else "-"
        rows.append((name, str(portion.weights), f"{portion.bytes / 1e6:.1f} MB", error))
    print_table(rows)
    if done.unfit:
        print_lines(
            f"{len(done.unfit)} weights stay as they are: their columns do not split into blocks "
            f"({done.unfit[0]}, ..)"
        )
    if done.coarse:
        from mtpbuild.builder.formats.integers import describe_coarse_blocks

        print_lines(describe_coarse_blocks(done.coarse))
    print_lines(f"wrote {done.folder}")
