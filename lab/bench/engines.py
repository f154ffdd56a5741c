"""Builds of a benchmark's engines; the user's own engines are never overwritten."""

from dataclasses import dataclass, replace
from pathlib import Path

from mtpbuild.builder.compiler.build import build
from mtpbuild.builder.compiler.plans import plan_engines
from mtpbuild.builder.compiler.source import find_source
from mtpbuild.builder.engine import layout
from mtpbuild.builder.plan.plan import Nextn, choose_drafter, sort_nextns
from mtpbuild.builder.plan.recipe import choose_default_target
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages
from mtpbuild.builder.targets import load_target
from mtpbuild.builder.weights.scheme import AS_STORED
from mtpbuild.lab.measure.workbench import WORKBENCH

PRIVATE = Path("engines") / ".bench"


@dataclass(frozen=True, slots=True)
class EnginePair:
    """The engine directories of one nextn; the verifier has the same nextn and drafts nothing."""

    nextn: Nextn
    folder: Path
    verifier: Path | None


def build_engines(request: BuildRequest, stages: Stages) -> list[EnginePair]:
    """Build an engine and a verifier per nextn, unless they exist; nextn 0 is always built.

    request: its drafter is for every nextn except "auto", which always uses MTP Eagle.
    """
    source = find_source(request)
    requests = {
        nextn: replace(
            request, nextn=(nextn,), drafter=None if nextn == "auto" else request.drafter
        )
        for nextn in sort_nextns([0, *(request.nextn or ())])
    }
    for nextn, asked in requests.items():  # fail before anything is built
        choose_drafter(source.config, nextn, asked.drafter)

    def build_at(out: Path, asked: BuildRequest) -> Path:
        stages.watch(f"building {out}")
        build(replace(asked, out=out), WORKBENCH, stages)
        return out

    pairs = []
    for nextn, asked in requests.items():
        name = f"{source.engine}_n{nextn}"
        folder = build_at(choose_folder(name, asked), asked)
        verifier = None
        if nextn not in (0, "auto"):
            undrafted = replace(asked, drafter="none")
            verifier = build_at(make_private_folder(name, undrafted), undrafted)
        pairs.append(EnginePair(nextn, folder, verifier))
    return pairs


def choose_folder(name: str, request: BuildRequest) -> Path:
    """Choose an engine's folder: the usual one of `mtpbuild build`, or a private one.

    The private one is for flags that change the engine, or if another engine is in the usual one.
    """
    changed = request.drafter, request.scheme, request.acceptance_rules, request.options
    if has_usual_target(request) and request.max_batch == 1 and not any(changed):
        plans = plan_engines(replace(request, force=True))
        (usual,) = plans.engines
        if not usual.exists():
            return usual
        if layout.find_engine(usual, plans.take_fingerprints().fingerprints[usual]):
            return usual
    return make_private_folder(name, request)


def has_usual_target(request: BuildRequest) -> bool:
    """Return whether the target is the one that `mtpbuild build` chooses by default."""
    return load_target(request.target) is load_target(choose_default_target(request.model))


def make_private_folder(name: str, request: BuildRequest) -> Path:
    scheme = request.scheme
    kind = "" if scheme is None else f"_{scheme.main}_head_{scheme.head or AS_STORED}"
    if not has_usual_target(request):
        kind += f"_{request.target}"
    kind += "".join(f"_{rule}" for rule in request.acceptance_rules)
    kind += "".join(f"_{option}-{value}" for option, value in request.options.items())
    return PRIVATE / f"{name}_{request.drafter or 'default'}_b{request.max_batch}{kind}"
