"""`mtpbuild plan`: sizes that were counted by hand, published speeds, refusals."""

import json
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.models import load_config
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config
from mtpbuild.builder.models.ranks import check_ranks
from mtpbuild.builder.plan.recipe import find_recipe
from mtpbuild.builder.plan.weight_classes import count_classes, find_layout
from mtpbuild.builder.program.opened_model import make_model
from mtpbuild.builder.targets.tensorrt import TARGET
from mtpbuild.builder.weights.table import choose_formats, make_family_table
from mtpbuild.lab.forecast.forecast import (
    PUBLISHED_ACCEPTANCE,
    PUBLISHED_SPEED,
    Forecast,
    ForecastRequest,
    count_gpu_classes,
    fit_latency,
    forecast,
)
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.ranks import Ranks
from tests.support.checkpoints import BASE
from tests.support.forecasts import counted_once
from tests.support.invoke import invoke, refusal

pytestmark = pytest.mark.xdist_group("forecast")  # one worker counts R1's weights
EIGHT = Ranks(8)
FORMATS = {"attention": "bf16", "dense MLPs": "nvfp4", "experts": "nvfp4"}


@pytest.fixture(scope="module", autouse=True)
def one_count() -> Iterator[None]:
    with counted_once():
        yield


@pytest.fixture(scope="module")
def fp8() -> Forecast:
    return forecast(ForecastRequest("deepseek-r1", (0, 1), ranks=EIGHT))


@pytest.fixture(scope="module")
def fp4() -> Forecast:
    return forecast(ForecastRequest("deepseek-r1-fp4", (0, 1, 2, 3, 4, 5), ranks=EIGHT))


@pytest.fixture(scope="module")
def config() -> DeepseekV3Config:
    recipe = find_recipe("deepseek-v3")
    assert recipe is not None
    found = load_config(recipe.config_folder)
    assert isinstance(found, DeepseekV3Config)
    return found


def by_class(f: Forecast) -> dict[str, float]:
    """Return gigabytes of the main model's classes, and of all modules."""
    found = {one.name: one.bytes / 1e9 for one in f.model.classes if not one.module}
    return found | {"MTP": sum(one.bytes for one in f.model.classes if one.module) / 1e9}


def check_sizes(found: Forecast, wanted: dict[str, float]) -> float:
    """Check gigabytes of classes; return all of the checkpoint's."""
    sizes = by_class(found)
    assert {name: sizes[name] for name in wanted} == pytest.approx(wanted, rel=1e-3, abs=0.005)
    return found.checkpoint_bytes / 1e9


def test_sizes_in_fp8(fp8: Forecast) -> None:
    wanted = {"attention": 11.42, "dense MLPs": 1.19, "experts": 654.07, "shared experts": 2.55}
    wanted |= {"router, norms": 0.21, "MTP": 11.72}
    assert check_sizes(fp8, wanted) == pytest.approx(688.57, rel=1e-3)
    sizes = by_class(fp8)
    assert sizes["embedding"] + sizes["head"] == pytest.approx(3.71, rel=1e-3)
    parameters = sum(one.parameters for one in fp8.model.classes if not one.module)
    assert parameters / 1e9 == pytest.approx(671.03, rel=1e-3)


def test_sizes_in_nvfp4(fp4: Forecast) -> None:
    wanted = {"attention": 22.83, "dense MLPs": 0.67, "experts": 367.82, "shared experts": 1.44}
    assert check_sizes(fp4, wanted | {"MTP": 23.22}) == pytest.approx(423.6, rel=1e-3)
    sizes = by_class(fp4)
    assert sum(sizes.values()) - sizes["MTP"] == pytest.approx(396.68, rel=1e-3)
    second = forecast(ForecastRequest("deepseek-r1-0528-fp4-v2", (0,), ranks=EIGHT))
    assert second.checkpoint_bytes / 1e9 == pytest.approx(413.3, rel=1e-3)


def test_sizes_per_rank(fp8: Forecast, fp4: Forecast) -> None:
    for one, main, modules in ((fp8, 88.1, 1.53), (fp4, 52.06, 2.94)):
        shares = [(c.module, c.per_rank / 1e9) for c in one.model.classes]
        assert sum(size for module, size in shares if not module) == pytest.approx(main, rel=1e-3)
        assert sum(size for module, size in shares if module) == pytest.approx(modules, abs=0.05)
    for name, main in (("deepseek-r1", 105.05), ("deepseek-r1-fp4", 75.13)):
        ranks = Ranks(8, ep=8, attention_dp=True)
        one = forecast(ForecastRequest(name, (0,), ranks=ranks))
        assert one.weight_bytes / 1e9 == pytest.approx(main, rel=1e-3)
    assert fp4.cache_bytes == 71424
    plain = forecast(ForecastRequest("deepseek-r1-fp4", (0,), ranks=EIGHT, cache_dtype="float32"))
    assert plain.cache_bytes == 2 * 70272


@pytest.mark.parametrize(
    ("model", "ranks"),
    [
        ("deepseek-r1", EIGHT),
        ("deepseek-r1", Ranks(8, ep=4)),
        ("deepseek-r1-fp4", EIGHT),
        ("deepseek-r1-fp4", Ranks(8, ep=8, attention_dp=True)),
        ("deepseek-v3.2", EIGHT),
        ("glm-4.5-air", Ranks(2)),
        ("mimo-7b-rl", Ranks()),
    ],
)
def test_a_rank_holds_what_a_dry_run_counts(model: str, ranks: Ranks) -> None:
    """A build counts the parameters of the model that it exports."""
    found = find_layout(model, None)
    layout = replace(found, config=replace(found.config, num_hidden_layers=4))
    style = TARGET.style
    table = choose_formats(make_family_table(layout.config, ranks), layout.format, style)
    held = make_model(table, style, "meta").parameters()
    wanted = sum(weight.numel() * weight.element_size() for weight in held)
    counted = sum(c.per_rank for c in count_gpu_classes(layout, ranks))
    assert counted == pytest.approx(wanted, abs=64)  # ids of a rank's experts


def test_speed_is_predicted(fp4: Forecast) -> None:
    """Fitted to nextn 0 and 1; the published nextn 2 to 5 are foretold within 5 %."""
    assert fp4.is_published
    speeds = [step.tokens_per_s for step in fp4.steps]
    assert speeds[:2] == pytest.approx(PUBLISHED_SPEED[:2])
    assert speeds[2:] == pytest.approx(PUBLISHED_SPEED[2:], rel=0.05)
    rooflines = [
        length / s.roofline for length, s in zip(PUBLISHED_ACCEPTANCE, fp4.steps, strict=True)
    ]
    assert all(r > 6 * s for r, s in zip(rooflines, PUBLISHED_SPEED, strict=True))  # useless alone
    assert {step.limit for step in fp4.steps} == {"latency"}


def test_a_step_by_hand(fp4: Forecast) -> None:
    """Bytes of nextn 3 on one of 8 ranks: weights once per pass, 4 tokens' experts."""
    parts = {part.name: part for part in fp4.steps[3].parts}
    four = 256 * (1 - (248 / 256) ** 4)
    second_scales = 4 * (2 * 2048 / 8 + 7168)  # of a rank's outputs: gate and up, down
    expert = 3 * 2048 * 7168 * 4.5 / 8 / 8 + second_scales
    assert parts["experts"].bytes == pytest.approx(58 * four * expert, rel=1e-4)
    assert parts["caches"].bytes == 2048 * 70272
    assert parts["head"].bytes == 129280 * 7168 * 2 / 8
    assert parts["head of drafts"].bytes == 3 * parts["head"].bytes
    assert parts["MTP caches"].bytes == 3 * 2048 * 1152
    module = 3 * 2048 * 7168 * 2 / 8  # one expert, bf16; passes of 4, 1 and 1 tokens
    others = sum(c.per_rank for c in fp4.model.classes if c.module and c.name != "experts")
    assert parts["MTP modules"].bytes == pytest.approx(3 * others + (four + 16) * module, rel=1e-4)
    shared = 2 * 4 * 58 * 3 * 2048 * 7168 / 8
    assert parts["shared experts"].operations == pytest.approx(shared, rel=1e-4)
    assert parts["experts"].operations == pytest.approx(8 * shared, rel=1e-4)
    assert parts["experts"].seconds == parts["experts"].bytes / 8e12


def test_large_batches_are_limited_by_compute() -> None:
    request = ForecastRequest("deepseek-r1-fp4", (3,), ranks=EIGHT, max_batch=4096, context_len=1)
    parts = {part.name: part for part in forecast(request).steps[0].parts}
    assert parts["attention"].limit == "compute"
    assert parts["attention"].seconds == parts["attention"].operations / 2.25e15


def test_attention_dp_splits_requests() -> None:
    ranks = Ranks(8, ep=8, attention_dp=True)
    request = ForecastRequest("deepseek-r1-fp4", (0,), ranks=ranks, max_batch=64)
    split = forecast(request)
    assert split.needed_tokens == 8 * (4096 + 1)
    (step,) = split.steps
    parts = {part.name: part for part in step.parts}
    assert parts["caches"].bytes == 8 * 2048 * 70272
    (attention,) = (c for c in split.model.classes if c.name == "attention" and not c.module)
    assert attention.per_rank == attention.bytes
    assert parts["attention"].operations == pytest.approx(2 * 8 * attention.parameters)


def test_a_folder_is_read(smallest: Path) -> None:
    """StoredTensor sizes come from the files: here fp32."""
    found = forecast(ForecastRequest(str(smallest), (0, 1)))
    from safetensors.torch import load_file

    tensors = load_file(smallest / "model.safetensors").values()
    assert found.checkpoint_bytes == sum(tensor.nbytes for tensor in tensors)
    assert sum(one.parameters for one in found.model.classes) == sum(prod(t.shape) for t in tensors)
    halves = found.checkpoint_bytes / 2  # an engine's floats are bfloat16, but for routers
    assert halves < found.weight_bytes < 1.02 * halves


EXPERTS_4 = {"targets": ["re:.*mlp.experts.*"], "weights": {"num_bits": 4, "group_size": 32}}
ATTENTION_8 = {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float"}}
ALL_8 = {"targets": ["Linear"], "weights": {"num_bits": 8}}
FOUR = {f"model.layers.{i}.mlp.experts": {"quant_algo": "NVFP4"} for i in range(3)}
EIGHT_BITS = {f"model.layers.{i}.self_attn.o_proj": {"quant_algo": "FP8"} for i in range(3)}
ATTENTION_4 = {"bf16", "int4", "int8"}  # q_a_proj is finer, kv_b_proj is not quantised
# Groups of compressed-tensors or settings of ModelOpt; formats of attention, experts and others.
MIXED: dict[str, tuple[Any, tuple[set[str], ...]]] = {
    "the small group first": ([ATTENTION_8, EXPERTS_4], ({"fp8"}, {"int4"}, {"bf16"})),
    "the large group first": ([EXPERTS_4, ATTENTION_8], ({"fp8"}, {"int4"}, {"bf16"})),
    "all others in a group": ([ALL_8, EXPERTS_4], ({"int8", "bf16"}, {"int4"}, {"int8"})),
    "one group": ([ATTENTION_8 | {"targets": ["Linear"]}], ({"fp8"}, {"fp8"}, {"fp8"})),
    "ModelOpt's lists": (
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": FOUR | EIGHT_BITS},
        ({"fp8", "bf16"}, {"nvfp4"}, {"bf16"}),
    ),
    "auto-round's own": (
        {"quant_method": "auto-round", "bits": 4, "extra_config": {
            ".*self_attn.*": {"bits": 8}, ".*shared_expert.*": {"bits": 16},
        }},
        ({"int8", "bf16"}, {"int4"}, {"int4"}),
    ),
    "GPTQ's own": (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*experts.*": {"bits": 8}}},
        (ATTENTION_4, {"int8"}, {"int4"}),
    ),
    "ModelOpt's fp8": ({"quant_algo": "FP8"}, ({"fp8"}, {"fp8"}, {"fp8"})),
}  # fmt: skip


@pytest.mark.parametrize("case", MIXED)
def test_a_configuration_alone_tells_formats(case: str, tmp_path: Path) -> None:
    """Before its weights are here, each kind of weight counts in the group that names it."""
    settings, wanted = MIXED[case]
    if isinstance(settings, list):
        groups = {f"group_{i}": group for i, group in enumerate(settings)}
        settings = {"config_groups": groups, "ignore": ["re:.*shared_experts.*"]}
    method = "compressed-tensors" if "ignore" in settings else "modelopt"
    sizes = dict.fromkeys(("hidden_size", "q_lora_rank", "kv_lora_rank", "v_head_dim"), 64)
    sizes |= dict.fromkeys(("intermediate_size", "moe_intermediate_size", "qk_nope_head_dim"), 64)
    raw = BASE | sizes | {"quantization_config": {"quant_method": method} | settings}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    classes = count_classes(find_layout(str(tmp_path), None), Ranks())
    found = {each.name: {*each.formats} for each in classes if not each.module}
    names = ("attention", "experts", "dense MLPs")
    assert tuple(found[name] for name in names) == wanted
    others = found["shared experts"] == {"bf16"}  # which are ignored, not listed, or said so
    assert others == bool({"ignore", "quantized_layers", "extra_config"} & settings.keys())


def test_measured_speeds() -> None:
    """step = base + per draft + parts, through both measurements."""
    fitted = fit_latency([(0, 0.010, 0.002), (2, 0.015, 0.003)], "x")
    assert fitted.base == pytest.approx(0.008)
    assert fitted.per_draft == pytest.approx(0.002)
    code, out, _ = plan("--nextn 0,1,3 --measured 0=80,3=190 --acceptance 1,1.8,2.7 --json")
    assert code == 0
    speeds = json.loads(out)["predicted_tokens_per_s"]
    assert (speeds[0], speeds[2]) == (pytest.approx(80), pytest.approx(190))
    assert 80 < speeds[1] < 190


def plan(flags: str, model: str = "deepseek-r1-fp4") -> tuple[int, str, str]:
    return invoke("plan", "--model", model, "--tp", "8", *flags.split())


def test_json() -> None:
    code, out, err = plan("--nextn 0,1,2,3,4,5 --gpu b200 --json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    assert found["nextn"] == [0, 1, 2, 3, 4, 5]
    assert found["checkpoint_bytes"] == pytest.approx(423.6e9, rel=1e-3)
    assert found["weights_bytes_per_rank"] == pytest.approx(52.06e9 + 2.94e9, rel=1e-3)
    assert found["tensorrt_weights_bytes_per_rank"] == pytest.approx(65.4e9, rel=1e-2)
    assert found["kv_bytes_per_token_per_rank"] == 71424
    assert found["fits"]
    lists = {key for key, value in found.items() if isinstance(value, list)} - {"classes"}
    assert " ".join(sorted(lists)) == (
        "acceptance_lengths bytes_per_step distinct_experts limits nextn operations_per_step parts "
        "predicted_speedups predicted_step_s predicted_tokens_per_s roofline_step_s "
        "roofline_tokens_per_s"
    )
    assert all(len(found[key]) == 6 for key in lists)
    assert found["predicted_speedups"][0] == 1
    one: dict[str, Any] = json.loads(plan("--nextn 3 --json")[1])
    assert one["nextn"] == [3]
    assert all(one[key] == [found[key][3]] for key in lists)


def test_tables(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    code, out, err = plan(f"--nextn 0..5 --picture {picture}")
    assert (code, err) == (0, "")
    assert "423.60 GB" in out
    assert "71,424 bytes per token on every rank" in out
    assert "assumed" not in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, out, _ = plan("--nextn 1 --gpu h200")
    assert "assumed to hold here" in out
    assert "over nextn 0" in out
    code, out, _ = plan("--nextn 0 --gpu h100", "deepseek-r1")
    assert code == 0
    assert "does not fit: " in out
    assert "GB too much before any cache" in out
    assert "over nextn 0" not in out
    assert "tokens/s" not in out
    code, out, _ = plan("--nextn 0 --max-batch 400 --max-seq-len 8192")
    assert "does not fit: lower --max-batch or --max-seq-len" in out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--tp 3", "--tp 3 does not divide num_attention_heads 128; possible: 1, 2, 4, 8"),
        ("--tp 16", "--tp 16: a b200 machine has 8 GPUs"),
        ("--tp 0", "--tp 0 is outside 1..64"),
        ("--ep 3", "--ep 3 does not divide both --tp 8 and the 256 routed experts; possible: 1, 2"),
        ("--bandwidth 9", "--bandwidth goes with --cpu: a GPU's is the data sheet's"),
        ("--memory 9", "--memory goes with --cpu: a GPU's is the data sheet's"),
        ("--disk-bandwidth 9", "--disk-bandwidth goes with --memory"),
        ("--gpu b300", "--gpu b300 is unknown; supported: h100, h200, b200"),
        ("--nextn 16", "--nextn 16 is outside 0..15"),
        ("--nextn 0..6", "no acceptance length is published for nextn 6: give --acceptance"),
        ("--nextn 3..1", "--nextn 3..1: the range must rise"),
        ("--nextn 0,1 --acceptance 1", "--acceptance has 1 lengths, --nextn 2"),
        ("--nextn 1 --acceptance 2.5", "--acceptance 2.5: nextn 1 gives 1..2 tokens"),
        ("--nextn 1 --acceptance x", "--acceptance 'x' is not a list"),
        ("--measured 0=1", "--measured '0=1': give tokens/s at two different nextn"),
        ("--measured 1=5,1=6", "give tokens/s at two different nextn"),
        ("--measured 0=5000,1=9000", "beyond the machine's memory and arithmetic (nextn 0: 0.20"),
        ("--nextn 0,1 --measured 0=111,3=250", "--measured: nextn 3 is not among --nextn"),
        ("--cache-dtype int8", "--cache-dtype int8 is unknown; supported: bfloat16, float32"),
        ("--max-batch 0", "--max-batch 0 must be at least 1"),
    ],
)
def test_refusals(flags: str, says: str) -> None:
    assert says in refusal("plan", "--model", "deepseek-r1-fp4", "--tp", "8", *flags.split())


def test_blocks_bound_the_split(config: DeepseekV3Config) -> None:
    """Blocks of 128 columns allow DeepSeek's experts 16 parts, not 32; ep leaves them whole."""
    from dataclasses import replace

    fp8 = dict.fromkeys(FORMATS, "fp8")
    check_ranks(config, Ranks(16), fp8)
    with pytest.raises(UsageError, match=r"moe_intermediate_size 2048 into blocks of 128; .* 16$"):
        check_ranks(config, Ranks(32), fp8)
    check_ranks(config, Ranks(32, ep=32), FORMATS)
    three = replace(config, moe_intermediate_size=3 * 128)
    check_ranks(three, Ranks(6, ep=2, attention_dp=True), fp8)
