"""Write engine.json: the model, the flags, the target, the programs, the hash of every file."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.builder.checkpoint.side_files import side_files
from mtpbuild.builder.compiler.plans import Plans
from mtpbuild.builder.engine.staged import StagedFolder
from mtpbuild.builder.plan.plan import make_state_specs
from mtpbuild.runtime.contract.drafters import package_of_drafter
from mtpbuild.runtime.contract.manifest import (
    MANIFEST,
    PROBE_VERSION,
    BuildInfo,
    FileSpec,
    Manifest,
    ModelInfo,
    ProgramSpec,
    hash_file,
)
from mtpbuild.runtime.contract.rules import BUILT_IN, package_of_rule
from mtpbuild.runtime.cpu_library import LAYOUT

if TYPE_CHECKING:
    from mtpbuild.builder.program.opened_model import OpenedModel

FROM_CONFIG = (  # fields of ModelInfo that the configuration has by the same names
    *("vocab_size", "num_hidden_layers", "num_nextn_predict_layers", "max_position_embeddings"),
)
FROM_PLAN = (  # fields of BuildInfo that the plan has by the same names
    *("nextn", "drafter", "adaptive", "max_batch", "max_seq_len", "capacity", "prefill_chunk"),
    *("quantised_to", "head_weights", "weight_bits", "calibrated", "draft_vocab", "dtype"),
)


def write_manifests(
    plans: Plans,
    out: Path,
    model: "OpenedModel",
    staged: StagedFolder,
    folders: Mapping[int, Path],
    programs: dict[str, ProgramSpec],
    exact: bool | None,
) -> None:
    """Write engine.json into the engine's folder, and into its ranks' folders if it is split.

    exact: false if the programs' operators rule it out; None until a probe has run.
    """
    plan = plans.engines[out]
    first = next(iter(folders.values()))
    ranks: dict[Path, int | None] = {folder: rank for rank, folder in folders.items()}
    for folder, rank in (ranks | {staged.folder: None}).items():
        manifest = Manifest(
            mtpbuild=version("mtpbuild"),
            model=make_model_info(model),
            build=make_build_info(plans, out, model, exact),
            target=plans.target.info(plan),
            capabilities={
                "acceptance": [*BUILT_IN, *plan.rules],
                "drafter": [] if plan.drafter is None else [plan.drafter],
            },
            lookahead=plan.lookahead,
            programs=programs,
            state=make_state_specs(plan),
            files=describe_files(folder, staged.hashes(first) | staged.hashes(folder)),
            rank=rank,
        )
        (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def make_model_info(model: "OpenedModel") -> ModelInfo:
    """Return the model's part of a manifest."""
    return ModelInfo(
        name=model.source.name,
        architecture=model.family.name,
        parameters=model.table.parameters,
        **{name: getattr(model.config, name) for name in FROM_CONFIG},
        **vars(model.ids),
        head=name_head(model),
    )


def name_head(model: "OpenedModel") -> str | None:
    """Name what can draft, and the file or folder that it was joined from."""
    config, place = model.config, model.source.mtp
    if config.head is not None:
        name = config.head.title
    elif count := config.num_nextn_predict_layers:
        name = "its MTP module" if count == 1 else f"its {count} MTP modules"
    else:
        return None
    return name if place is None else f"{name} from {place.name}"


def make_build_info(plans: Plans, out: Path, model: "OpenedModel", exact: bool | None) -> BuildInfo:
    """Return the flags of the build, and what it chose by itself."""
    plan, layers = plans.engines[out], plans.request.layers
    packages = {name: package_of_rule(name) for name in plan.rules}
    if plan.drafter is not None:
        packages[plan.drafter] = package_of_drafter(plan.drafter)
    return BuildInfo(
        **{name: getattr(plan, name) for name in FROM_PLAN},
        **vars(plan.ranks),
        weights=model.weights_type,
        block_size=model.block_size,
        cpu_layout=LAYOUT if model.style.packs_weights else None,
        int8_modules=model.scheme.int8_modules if model.scheme else (),
        balanced_keys=model.balanced_keys,
        exact=exact,
        probe_version=PROBE_VERSION,
        packages={name: package for name, package in packages.items() if package},
        fingerprint=plans.fingerprints[out],
        revision=plans.request.revision,
        layers=None if layers is None else str(layers),
    )


def describe_files(folder: Path, known: Mapping[str, str]) -> dict[str, FileSpec]:
    """Return size and sha256 of every file but the manifest; known: hashes that need no reading."""
    top = {path.name for path in folder.iterdir() if path.is_file()}
    return {
        name: FileSpec(
            size=(folder / name).stat().st_size, sha256=known.get(name) or hash_file(folder / name)
        )
        for name in sorted(top.union(side_files(folder)) - {MANIFEST})
    }
