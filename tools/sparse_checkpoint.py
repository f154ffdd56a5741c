"""Writes a recipe's checkpoint with real headers and holes for the data, which read as 0.

    python tools/sparse_checkpoint.py deepseek-r1-fp4 --out /tmp/r1-fp4
    mtpbuild build --dry-run --model deepseek-r1-fp4 --checkpoint /tmp/r1-fp4 --nextn 3

It takes a few MB on a file system with sparse files (ext4, xfs, btrfs, tmpfs).
"""

import argparse
import shutil
from pathlib import Path

from mtpbuild.builder.formats import Entry
from mtpbuild.builder.models import find_family_of
from mtpbuild.builder.models.common.weight import WHOLE, StoredTensor
from mtpbuild.builder.plan.recipe import find_recipe
from mtpbuild.builder.plan.weight_classes import (
    CheckpointLayout,
    count_classes,
    find_layout,
    sum_portions,
)
from mtpbuild.builder.weights.placed import Shard, split_into_shards, write_index
from mtpbuild.runtime.ranks import ALONE


def stored(layout: CheckpointLayout) -> dict[str, Entry]:
    """Return every tensor of the repository, including the copies in MTP layers."""
    family, config = find_family_of(layout.config), layout.config
    table = family.weight_table(config, WHOLE)
    sources = {s.name: s for weight in table for s in weight.stored}
    if layout.repeated:
        for copy, original in family.duplicates(config).items():
            sources.setdefault(copy, StoredTensor(copy, sources[original].shape))
    return {
        source.name + suffix: part
        for source in sources.values()
        for suffix, part in layout.parts(source, layout.format(source)).items()
    }


def write_sparse(folder: Path, shard: Shard) -> None:
    header = shard.header()
    with (folder / shard.file).open("wb") as file:
        file.write(header)
        file.truncate(len(header) + shard.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    recipe = find_recipe(arguments.recipe)
    if recipe is None:
        parser.error(f"no recipe is called {arguments.recipe}")
    arguments.out.mkdir(parents=True)
    layout = find_layout(recipe.name, None)
    shards = split_into_shards(stored(layout))
    for shard in shards:
        write_sparse(arguments.out, shard)
    write_index(arguments.out, shards)
    shutil.copyfile(recipe.config_folder / "config.json", arguments.out / "config.json")
    total = sum(shard.nbytes for shard in shards)
    print(f"wrote {len(shards)} files of {total:,} bytes, all holes, to {arguments.out}")
    for name, portion in sum_portions(layout, count_classes(layout, ALONE)).items():
        print(f"{name}: {portion.parameters:,} parameters, {portion.bytes:,} bytes")


if __name__ == "__main__":
    main()
