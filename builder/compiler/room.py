"""Refuse an engine that this machine has no room for, before its checkpoint is downloaded."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mtpbuild.builder.checkpoint.hub_cache import cache_folder
from mtpbuild.builder.checkpoint.readable import stored_as
from mtpbuild.builder.forecast.cpu import MAPPED
from mtpbuild.builder.forecast.weights import TIED, CheckpointLayout, count_classes, in_engine
from mtpbuild.builder.measure.host import Room
from mtpbuild.builder.plan.plan import Plan, size_of, state_specs
from mtpbuild.builder.targets.target import Target
from mtpbuild.builder.weights.scheme import SCHEMES, build_scheme
from mtpbuild.runtime.errors import DownloadError


def check_room(
    name: str, wanted: int, target: Target, plans: Mapping[Path, Plan], folder: Path, room: Room
) -> None:
    """Raise DownloadError if download, engine or the engine's run need more room than there is.

    wanted: bytes to be fetched. folder: has the checkpoint's small files. The weights are counted
    once, as engines of one build share them; weights inside programs are not counted. Of several
    ranks one is counted: the others may be built and run on other machines.
    """
    downloads, plan = room.disk(cache_folder()), next(iter(plans.values()))
    if wanted > downloads.free:
        raise DownloadError(
            f"{name}: {gigabytes(wanted)} are to be fetched, and the disk of {cache_folder()} has "
            f"{gigabytes(downloads.free)} free; HF_HUB_CACHE names another folder"
        )
    place = next(iter(plans)).parent
    engines, memory = room.disk(place), room.memory()
    free = engines.free - (wanted if engines.device == downloads.device else 0)
    engine = weights_bytes(target, plan, folder)
    if engine > free:
        raise DownloadError(
            f"{name}: the engine takes {gigabytes(engine)}, and beside the download the disk of "
            f"{place.resolve()} has {gigabytes(free)} free{smaller(target, plan, folder)}; --out "
            "names another place"
        )
    needed = needed_memory(engine, list(plans.values()))
    if memory is not None and not plan.style.for_gpu and needed > memory:
        raise DownloadError(
            f"{name}: the engine needs {gigabytes(needed)} of memory, and this machine has "
            f"{gigabytes(memory)}{smaller(target, plan, folder)}; to build it for another machine, "
            f"fetch the checkpoint by `hf download {name}`"
        )


def needed_memory(engine: int, plans: list[Plan]) -> int:
    """Return the least memory that the largest of these engines needs to run."""
    return round(MAPPED * engine) + max(sum(map(size_of, state_specs(plan))) for plan in plans)


def smaller(target: Target, plan: Plan, folder: Path) -> str:
    """Return a hint at the smallest format that the target keeps, if the engine is larger."""
    sizes = {
        name: weights_bytes(target, replace(plan, scheme=build_scheme(name)), folder)
        for name in plan.style.formats
    }
    if not sizes or min(sizes.values()) >= weights_bytes(target, plan, folder):
        return ""
    best = min(sizes, key=lambda name: sizes[name])
    return f"; --weights {best} makes one of {gigabytes(sizes[best])}"


def weights_bytes(target: Target, plan: Plan, folder: Path) -> int:
    """Return the bytes of a rank's weights file."""
    stored, config = SCHEMES[stored_as(folder)], plan.config
    dtype = {"float32": "F32", "bfloat16": "BF16"}[plan.style.dtype]
    layout = CheckpointLayout("", config, lambda _: None, lambda _: dtype, repeated=False)
    held = in_engine(layout, plan.scheme or stored, plan.style, plan.ranks, dtype)
    found = count_classes(held, plan.ranks)
    return round(sum(one.per_rank * (2 if one.name == TIED else 1) for one in found))


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
