"""Refuse checkpoints that a build can't read, from their file names and config.json alone.

So a repository is refused before it is downloaded, with the same messages as a folder.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mtpbuild.builder.checkpoint.side_files import CONFIG
from mtpbuild.builder.formats import METHODS, READS
from mtpbuild.builder.formats.compressed_tensors import METHOD, name_kept_format
from mtpbuild.builder.formats.gptq import find_settings_of
from mtpbuild.builder.formats.mlx import METHOD as MLX
from mtpbuild.builder.formats.mlx import list_paths
from mtpbuild.builder.formats.modelopt import name_algorithm
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.files import read_json

MODELOPT = "hf_quant_config.json"
GPTQ = "quantize_config.json"
OF_WEIGHTS = ("quant_algo", "quantized_layers", "config_groups", "bits", "w_bit", "fmt")
TIKTOKEN, TOKENIZER = "tiktoken.model", "tokenizer.json"


def refuse_quantised(where: str | Path, folder: Path, instead: str = "") -> None:
    """Raise CheckpointError if config.json or ModelOpt's file names an unsupported format.

    where: the beginning of the message. instead: its end, which may name another model to build.
    """
    settings = read_quantisation(folder)
    if not settings:
        return
    method = str(settings.get("quant_method"))
    unread = METHODS[method](settings) if method in METHODS else method
    if unread is not None:
        raise CheckpointError(
            f"{where}: weights quantised as {unread} are not read; supported: {READS}{instead}"
        )


def name_stored_format(settings: Mapping[str, Any], name: str) -> str:
    """Return a recipe's name for the layout of a weight, by settings that are read."""
    method, module = settings.get("quant_method", "bf16"), name.removesuffix(".weight")
    if method == METHOD:
        return name_kept_format(settings, module)
    if method == "modelopt":
        return name_algorithm(settings, module)
    if method == "fp8" and settings.get("expert_dtype") == "fp4":
        return "fp8-fp4"
    if method in ("fp8", "bf16", "mtpbuild"):
        return str(settings.get("fmt")) if method == "mtpbuild" else method
    quantised: Any = find_settings_of(name, settings)
    if method == MLX:
        quantised = next(
            (settings[path] for path in list_paths(name) if path in settings), settings
        )
    if not isinstance(quantised, Mapping) or quantised.get("bits") == 16:
        return "bf16"
    wide = quantised.get("desc_act") or quantised.get("mode", "affine") != "affine"
    narrow = quantised.get("bits", 4) in (2, 3, 4) and not wide
    return "nvfp4" if quantised.get("mode") == "nvfp4" else "int4" if narrow else "int8"


def refuse_tokenizer(where: str, names: Collection[str]) -> None:
    """Raise CheckpointError for a tiktoken tokenizer that has no tokenizer.json beside it."""
    if TIKTOKEN in names and TOKENIZER not in names:
        raise CheckpointError(
            f"{where}: {TIKTOKEN} is not read: put a {TOKENIZER} with equal ids beside it (made "
            "with transformers' convert_slow_tokenizer, say), in a local folder that --model or "
            "--checkpoint names"
        )


def read_quantisation(folder: Path) -> Mapping[str, Any]:
    """Return the quantisation settings of config.json, ModelOpt's or GPTQ's file; {} if none.

    MLX's have a key of their own, which wins over what a conversion left.
    """
    config, text = read_object(folder / CONFIG), read_text_config(folder)
    raw = config.get("quantization_config") or text.get("quantization_config")
    mlx = config.get("quantization")
    if isinstance(mlx, dict) and {"bits", "group_size"} <= mlx.keys():
        return {"quant_method": MLX, **mlx}
    settings: Mapping[str, Any] = raw if isinstance(raw, dict) else {}
    if settings and "expert_dtype" in config:
        settings = {"expert_dtype": config["expert_dtype"], **settings}
    modelopt = read_object(folder / MODELOPT).get("quantization")
    if isinstance(modelopt, dict):
        settings = {"quant_method": "modelopt", **modelopt, **settings}
    if keeps_weights(settings):
        return {}
    if not settings and (gptq := read_object(folder / GPTQ)):
        return {"quant_method": "gptq", **gptq}
    return settings


def keeps_weights(settings: Mapping[str, Any]) -> bool:
    """Return whether settings are for the KV cache alone, whose format a build chooses itself."""
    caches = any(value for key, value in settings.items() if key.startswith("kv_cache"))
    weights = any(settings.get(key) for key in OF_WEIGHTS)
    return caches and not weights and settings.get("quant_method") in (None, "modelopt", METHOD)


def read_text_config(folder: Path) -> dict[str, Any]:
    """Return the text model's part of config.json; {} if that is missing or damaged."""
    config = read_object(folder / CONFIG)
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if the file is missing or holds anything else."""
    try:
        raw = read_json(path)
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}
