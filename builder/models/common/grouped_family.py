"""What families have in common whose layers are all grouped-query attention."""

from mtpbuild.builder.models.common import grouped_config
from mtpbuild.builder.models.common.copies import list_copies_in_layers
from mtpbuild.builder.models.common.grouped_config import GroupedConfig
from mtpbuild.builder.models.family import Family, import_lazily

COMMON = __name__.rpartition(".")[0]
# A family replaces its names, its configuration, and what is different in it.
GROUPED = Family(
    name="",
    architectures=(),
    model_type="",
    config=GroupedConfig,
    make_model=import_lazily(f"{COMMON}.grouped", "make_grouped_model"),
    weight_table=import_lazily(f"{COMMON}.grouped_weights", "weight_table"),
    copies=list_copies_in_layers,
    cache_widths=grouped_config.cache_widths,
    cache_sections=grouped_config.cache_sections,
    split_sizes=grouped_config.split_sizes,
    costs=grouped_config.costs,
    reference=import_lazily(f"{COMMON}.plain", "make_plain_grouped"),
)
