"""Terminal output of commands: streamed text with accepted drafts in colour, summaries, JSON."""

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import groupby
from json import dumps
from math import prod
from pathlib import Path
from typing import TextIO

from mtpbuild.runtime.configuration.input_file import generate_all, read_requests
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import HASH_LIMIT, PREFIXES, Manifest, list_ranks_here
from mtpbuild.runtime.contract.programs import host_type
from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.engine.loaded import Prompt
from mtpbuild.runtime.prefix_cache.cache import count_saved_bytes
from mtpbuild.runtime.prefix_cache.files import list_prefix_names
from mtpbuild.runtime.requests.request import Observer, Result
from mtpbuild.runtime.sampling.params import SamplingParams
from mtpbuild.runtime.tables import print_facts, print_lines, print_table
from mtpbuild.runtime.trace.recorder import Trace

GREEN, DIM, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
SYNTHETIC = "SYNTHETIC ACCEPTANCE: drafts accepted by chance, text and speed are not the model's"


def write_json_line(task_id: str | int, result: Result) -> str:
    """Return a request's result as a line of JSON; docs/cli-json.md describes it."""
    answer = {"task_id": task_id} | asdict(result)
    del answer["from_draft"]
    return dumps({key: value for key, value in answer.items() if value not in (None, ())})


def summary(result: Result, *, brief: bool = False) -> str:
    """Return a request's speed and acceptance as one line."""
    metrics, drafting = result.metrics, result.metrics.speculative_decoding
    parts = [
        f"{metrics.output_tokens} tokens ({result.finish_reason})",
        f"{metrics.tokens_per_s:.1f} tokens/s",
        f"first token {1000 * (metrics.ttft_s or 0):.0f} ms",
        f"acceptance length {drafting.mean_acceptance_length or 0:.2f}",
    ]
    if brief:
        return ", ".join(parts)
    if rates := drafting.per_position_acceptance_rates:
        parts.append("per position " + " ".join(f"{rate:.2f}" for rate in rates))
    if result.seed is not None:
        parts.append(f"seed {result.seed}")
    if result.synthetic_acceptance_rates:
        parts.insert(0, SYNTHETIC)
    return ", ".join(parts)


def answer_file(
    engine: Engine, path: Path, params: SamplingParams, json: bool, trace: Trace | None
) -> None:
    """Answer a file's requests in their order."""
    requests = read_requests(path, engine, params, check=True)
    for i, (request, result) in enumerate(generate_all(engine, requests, trace)):
        if not i:  # before that a request may still be refused
            print_dimmed(engine.manifest.drafting)
        if json:
            print(write_json_line(request.task_id, result), flush=True)
        else:
            print(f"[{request.task_id}] {summary(result)}", file=sys.stderr, flush=True)
            print(result.text or ",".join(map(str, result.token_ids)), flush=True)


def answer_prompt(
    engine: Engine, prompt: Prompt, params: SamplingParams, json: bool, trace: Trace | None
) -> None:
    if json:
        with engine.stream(prompt, params, observer=trace) as stream:
            print_dimmed(engine.manifest.drafting)
            print(write_json_line(0, stream.result()), flush=True)
    else:
        stream_answer(engine, prompt, params, trace)


def stream_answer(
    engine: Engine, prompt: Prompt, params: SamplingParams, observer: Observer | None = None
) -> Result:
    """Stream the text to standard output, then print the summary to standard error."""
    colour = has_colour(sys.stdout)
    with engine.stream(prompt, params, observer=observer) as stream:
        print_dimmed(engine.manifest.drafting)
        if colour and isinstance(prompt, str):
            print(dim(prompt, colour), end="")
        for chunk in stream:
            # Without a tokenizer a chunk has no spans: its ids are shown.
            ids = zip((f"{id} " for id in chunk.token_ids), chunk.from_draft, strict=True)
            spans = ((span.text, span.from_draft) for span in chunk.spans)
            parts = spans if engine.tokenizer else ids
            text = "".join(colour_draft(part, colour and draft) for part, draft in parts)
            print(text, end="", flush=True)
        print(flush=True)
        result = stream.result()
    print_dimmed(summary(result))
    return result


def print_dimmed(line: str) -> None:
    """Print a line to standard error, dimmed on a terminal."""
    print(dim(line, has_colour(sys.stderr)), file=sys.stderr)


def dim(text: str, colour: bool) -> str:
    """Return a text dimmed, if colours are shown."""
    return f"{DIM}{text}{RESET}" if colour else text


def describe(folder: Path, manifest: Manifest) -> None:
    """Print the manifest as tables."""
    print_lines(str(folder))
    print_facts(_list_facts(folder, manifest))
    state = {s.name for s in manifest.state}
    programs = [("program", "inputs", "outputs", "state")]
    for name, program in manifest.programs.items():
        inputs, outputs = (
            "\n".join(
                f"{t.name} {t.dtype}[{','.join(map(str, t.shape))}]"
                for t in tensors
                if t.name.removesuffix(".out") not in state
            )
            for tensors in (program.inputs, program.outputs)
        )
        carried = _shorten_series(t.name for t in program.inputs if t.name in state)
        programs.append((name, inputs, outputs, "\n".join(carried)))
    print_table(programs, texts=("inputs", "outputs", "state"))
    files = sorted(manifest.files.items())
    rows = [(name, f"{file.size:,}", file.sha256[:16]) for name, file in files]
    print_table([("file", "bytes", "sha256"), *rows])


def _list_facts(folder: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the names and values of an engine's properties."""
    model, build, target = manifest.model, manifest.build, manifest.target
    yield "model", f"{model.name} ({model.architecture}), {model.parameters:,} parameters"
    yield "layers", f"{model.num_hidden_layers} + {model.num_nextn_predict_layers} MTP"
    yield "vocabulary", f"{model.vocab_size:,}"
    drafted = f", of {build.draft_vocab:,} tokens" if build.draft_vocab else ""
    yield "nextn", f"{build.drafts}, drafter {build.drafter or 'none'}{drafted}"
    yield "capacity", f"{build.slots} slots of {build.max_seq_len:,} tokens"
    here = list_ranks_here(folder, manifest)
    groups = f", experts in {build.ep} groups" if build.ep > 1 else ""
    data_parallel = ", attention data-parallel" if build.attention_dp else ""
    partly = manifest.split and len(here) < build.tp
    some = f"; here: {', '.join(map(str, here)) or 'none'}" if partly else ""
    yield "ranks", f"{build.tp}{groups}{data_parallel}{some}"
    ends, as_stored = build.head_weights or build.dtype, build.quantised_to in (None, "floats")
    bits = f" within {build.weight_bits:g} bits" if build.weight_bits else ""
    by_build = "" if as_stored else f"{bits}, quantised by the build; embedding and head {ends}"
    yield "weights", build.weights + by_build
    if build.exact_note:
        yield "exact", build.exact_note
    caches = [s for s in manifest.state if s.role == "rows"]
    balanced = ", keys balanced" if manifest.build.balanced_keys else ""
    text = f"{len(caches)} of {caches[0].shape} {caches[0].dtype}{balanced}" if caches else "none"
    if windows := [s for s in manifest.state if s.role == "window"]:
        text += f"; {len(windows)} for windows, of {windows[0].shape}"
    yield "caches", text
    yield "prefill chunk", str(build.prefill_chunk)
    row, states = count_saved_bytes(manifest)
    more = f", and {states:,} for recurrent states" if states else ""
    prefixes = f"built in: {', '.join(list_prefix_names(manifest)) or 'none'}"
    if Feature.PREFIX_CACHE in manifest.features:
        prefixes += f"; of earlier prompts {row:,} bytes per token{more} (--prefix-cache-bytes)"
    yield "prefixes", prefixes
    versions = ", ".join(f"{name} {version}" for name, version in target.versions.items())
    yield "target", f"{target.name} on {target.hardware} ({versions})"
    if target.allreduce_strategy:
        yield "sums by", target.allreduce_strategy
    if cross := target.cross_compiled:
        told = f"not loaded yet; the compiler was told of a {cross.assumed}"
        where = f"for {cross.architecture} on a machine without a GPU"
        yield "cross-compiled", f"{where}, {told}; left out: {', '.join(cross.left_out)}"
    memory = sum(prod(s.shape) * host_type(s.dtype).itemsize for s in manifest.state) / 1e6
    sizes = {n: f.size for n, f in manifest.files.items() if not n.startswith(PREFIXES)}
    weights = sum(size for name, size in sizes.items() if name.endswith(".safetensors")) / 1e6
    slots = f"{memory:,.1f} MB of memory for its slots"
    kernels = "" if build.cpu_layout is None else "; mtpbuild's library of CPU kernels"
    of_weights = f"its weights once or oftener ({weights:,.1f} MB; docs/targets.md#memory)"
    yield "needs", f"{slots}, and {of_weights}{kernels}"
    capabilities = manifest.capabilities.items()
    yield "capabilities", ", ".join(f"{name}: {' '.join(each)}" for name, each in capabilities)
    if build.packages:
        yield (
            "packages",
            ", ".join(f"{name} of {package}" for name, package in build.packages.items()),
        )
    yield "built by", f"mtpbuild {manifest.mtpbuild}, fingerprint {build.fingerprint[:16]}"
    size = sum(file.size for file in manifest.files.values())
    checked = "bytes" if size <= HASH_LIMIT else "sizes"
    yield "size", f"{size / 1e6:,.1f} MB, all files present, {checked} as built"


def _shorten_series(names: Iterable[str]) -> Iterator[str]:
    """Shorten a list of names: kv.0, kv.1, kv.2, lengths -> kv.0 .. kv.2, lengths."""
    for _, group in groupby(names, lambda name: name.rpartition(".")[0] or name):
        first, *rest = group
        yield f"{first} .. {rest[-1]}" if rest else first


def colour_draft(text: str, draft: bool) -> str:
    """Return a text in green if it is an accepted draft's."""
    return f"{GREEN}{text}{RESET}" if draft and text else text


def has_colour(stream: TextIO) -> bool:
    """Tell whether a terminal shows colours, unless the user disabled them (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
