"""`benchmarks/one_machine.py`: the files that it writes, what it counts, what it prints."""

import json
import struct
import sys
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from rich.console import Console
from safetensors.torch import load_file

from mtpbuild.builder.compiler.quantize import QuantizeRequest
from mtpbuild.builder.models.common.plain import PlainMoE
from mtpbuild.builder.models.common.weight import WHOLE
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.builder.weights.table import list_weights
from mtpbuild.lab.verify.plain import load_plain
from mtpbuild.runtime.errors import UsageError
from tests.support.engines import greedy_ids
from tests.support.fake_target import quick_target
from tests.support.requests import build, build_request, quantize
from tests.support.scripts import benchmark

pytestmark = pytest.mark.xdist_group("one_machine")  # one engine serves them
WIDTHS = {
    "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2, "num_hidden_layers": 2,
    "vocab_size": 512,
}  # fmt: skip
MOE = WIDTHS | {
    "moe_intermediate_size": 128, "n_routed_experts": 24, "num_key_value_heads": 2,
    "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip
DENSE = WIDTHS | {"num_key_value_heads": 1, "head_dim": 128}
HYBRID = DENSE | {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
WINDOWED = DENSE | {
    "num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    "global_head_dim": 128, "num_global_key_value_heads": 1, "sliding_window": 32,
    "moe_intermediate_size": 64, "num_experts": 24, "top_k_experts": 4,
}  # fmt: skip
ARCHITECTURES = {
    "moe": "deepseek2", "dense": "qwen2", "hybrid": "qwen35", "windowed": "gemma4",
}  # fmt: skip


def tiny(kind: str, weights: str = "int4") -> Any:
    """Return a published shape with small numbers."""
    shapes = benchmark("one.shapes")
    recipe, sizes = {
        "moe": (shapes.MOE, MOE),
        "dense": (shapes.DENSE, DENSE),
        "hybrid": (shapes.HYBRIDS[0], HYBRID),
        "windowed": (shapes.WINDOWED[1], WINDOWED),
    }[kind]
    return shapes.Shape(kind, shapes.published(recipe, None).raw | sizes, weights, True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return checkpoints of all shapes in int4, and of one in bf16."""
    place, write = tmp_path_factory.mktemp("random"), benchmark("one.random_checkpoint")
    torch.set_num_threads(1)
    shapes = {kind: tiny(kind) for kind in ARCHITECTURES} | {"moe_fp32": tiny("moe", "fp32")}
    for name, shape in shapes.items():
        write.write_checkpoint(place / name, shape)
    return {folder.name: folder for folder in place.iterdir()}


def make_engine(model: Path, place: Path) -> Path:
    """One draft, from a quarter of the vocabulary."""
    (place / "ids.json").write_text(json.dumps([*range(128)]))
    flags = {"max_seq_len": 256, "max_batch": 2, "draft_vocab": str(place / "ids.json")}
    build(build_request(model, (1,), out=place / "n1", **flags))
    return place / "n1"


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine(folders["moe"], tmp_path_factory.mktemp("engine"))


@pytest.fixture
def no_programs(folders: dict[str, Path], tmp_path: Path) -> Path:
    """Return the same, but for programs: its weights are those of an engine."""
    with quick_target("onnxruntime"):
        return make_engine(folders["moe"], tmp_path)


def test_a_checkpoint_is_what_quantize_would_write(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Same tensors, shapes, dtypes and configuration; no value was ever quantised."""
    request = QuantizeRequest(str(folders["moe_fp32"]), tiny("moe").scheme, tmp_path / "quantised")
    quantize(request)
    wanted, found = (open_checkpoint(each).tensors for each in (request.out, folders["moe"]))
    kinds = [{n: (t.dtype, t.shape) for n, t in each.items()} for each in (found, wanted)]
    assert kinds[0] == kinds[1]
    configs = [json.loads((f / "config.json").read_text()) for f in (request.out, folders["moe"])]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("name", ["moe", "dense", "hybrid", "moe_fp32"])
def test_random_weights_make_a_model_that_can_be_timed(name: str, folders: dict[str, Path]) -> None:
    """Values keep their size, tokens differ, and go to experts of their own."""
    plain, routes = load_plain(folders[name]), list[torch.Tensor]()
    experts = [part for part in plain.modules() if isinstance(part, PlainMoE)]
    for part in experts:
        part.gate.register_forward_hook(lambda gate, given, out: routes.append(out[0] > 0))
    tokens = torch.randint(512, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = plain.logits(plain.main(tokens))[0]
    assert 0.1 < float(logits.std()) < 10
    assert len(logits.argmax(-1).unique()) > 48
    chosen = [int(each.any(0).sum()) for each in routes]
    assert len(chosen) == {"moe": 1, "moe_fp32": 1}.get(name, 0)
    assert all(count > 20 for count in chosen), "of 24"


@pytest.mark.full
def test_an_engine_of_it_drafts(folders: dict[str, Path], engine: Path) -> None:
    (output,) = greedy_ids(engine, [[5, 6, 7]], 40)
    assert len(set(output)) > 20


@pytest.mark.full
def test_our_side_answers(engine: Path, tmp_path: Path) -> None:
    """Real prompts, filled caches of two requests, drafts that are accepted by chance."""
    sides = benchmark("one.sides")
    asks = {
        "short": sides.decode(6, 16, filled=False),
        "prompt": sides.prompt(24),
        "two": sides.decode(6, 150, batch=2),
        "all": sides.decode(6, 16, rates=[1.0]),
    }
    found = sides.ours("ours", engine, asks, 512).run(1)
    assert [*found] == ["first", *asks]
    assert found["first"]["first_s"] > 0
    assert 0 < found["first"]["RssAnon"] < found["first"]["VmHWM"]
    steps = {name: len(answer["steps"]) for name, answer in found.items() if "steps" in answer}
    assert steps["short"] >= 6
    assert steps["all"] == 8, "two tokens each, but for the first step, which has no draft yet"
    assert found["all"]["tokens"] == 16
    assert found["two"]["tokens"] == 18, "a step more: the second request begins one later"
    assert len(found["prompt"]["seconds"]) == 2
    dead = sides.ours("ours", tmp_path / "none", asks, 512).run(1)
    assert "no such engine directory" in dead["error"]["message"]


def test_a_steps_bytes(folders: dict[str, Path], no_programs: Path, tmp_path: Path) -> None:
    """They were counted by hand: two tokens of one request and of two, and a step of llama.cpp."""
    cost, engine = benchmark("one.cost"), no_programs
    counted = cost.count(folders["moe"], tiny("moe"))
    held = cost.sum_weight_bytes(engine, counted.config)
    assert set(held) == {
        *("embedding", "head", "draft_head", "trunk", "trunk, routed"),
        *("module", "module, routed"),
    }
    assert held["draft_head"] * 4 == held["head"] == held["embedding"]
    assert held["trunk, routed"] == held["module, routed"], "of layer 1, and of the module"
    assert cost.count_row_bytes(cost.read_manifest(engine)) == {
        "kv": 2 * 160 * 4,
        "mtp_kv": 160 * 4,
    }
    for batch in (1, 2):
        chosen = 1 - (1 - 4 / 24) ** (2 * batch)
        routed = chosen * (held["trunk, routed"] + held["module, routed"])
        rest = held["trunk"] + held["module"] + held["head"] + held["draft_head"]
        step = counted.step(engine, 100, batch)
        assert step.bytes == pytest.approx(rest + routed + batch * 100 * 3 * 160 * 4)
    sizes = {"token_embd.weight": 10, "blk.1.ffn_up_exps.weight": 24, "output.weight": 3}
    assert counted.gguf(sizes, 0, 1).bytes == pytest.approx(3 + 4)
    machine = benchmark("one.machine").Machine(((1.0, 1.0),), fp32=1e30, int8=1e30)
    assert counted.gguf(sizes, 0, 1).seconds(machine, "int4") == pytest.approx(7)
    slow = benchmark("one.machine").Machine(((1.0, 1e30),), fp32=1.0, int8=2.0)
    one = counted.gguf(sizes, 0, 1)
    assert one.seconds(slow, "int4") == pytest.approx(one.products / 2)
    table = {weight.name: weight for weight in list_weights(counted.config, WHOLE)}
    unread = ["layers.1.self_attn.o_proj", "layers.1.mlp.down_proj"]
    read = [f"model.{name}.values" for name in table if name not in unread]
    graph = helper.make_graph([helper.make_node("Chain", read, ["y"])], "prefill", [], [])
    onnx.save(helper.make_model(graph), tmp_path / "prefill.onnx")
    whole = counted.gguf_prompt(sizes, tmp_path, 16)
    last = 2.0 * 512 * 256  # the head's, of the last token alone, as are the unread weights'
    last += sum(2 * prod(stored.shape) for stored in table[unread[0]].stored)
    last += sum(2 * prod(stored.shape) * 4 / 24 for stored in table[unread[1]].stored)
    assert whole.products == pytest.approx(16 * (one.products - last) + last)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_gguf_has_the_trunks_weights(kind: str, folders: dict[str, Path]) -> None:
    """There are as many as in the checkpoint without its MTP modules, or with them."""
    shape, file = tiny(kind), benchmark("gguf_file")
    layers = tuple(f"model.layers.{i}." for i in range(shape.config.num_hidden_layers))
    head = () if shape.config.tie_word_embeddings else ("lm_head.",)  # else it is the embedding
    trunk = ("model.embed_tokens.", "model.norm.", *head, *layers)
    stored = load_plain(folders[kind]).state_dict()
    for modules, prefixes in (0, trunk), (1, (*trunk, "mtp.")):
        if modules and kind != "hybrid":
            continue
        wanted = sum(value.numel() for name, value in stored.items() if name.startswith(prefixes))
        shapes = file.find_shapes(dict(shape.raw), modules)
        shapes.pop("rope_freqs.weight", None)  # Gemma-4's; computed, not stored
        assert sum(int(np.prod(size)) for size in shapes.values()) == wanted
    convert = benchmark("gguf_convert")
    assert convert.find_architecture(dict(shape.raw)) == ARCHITECTURES[kind]


def test_a_checkpoint_as_gguf(tmp_path: Path) -> None:
    """Its values are read again as they are stored, or as llama.cpp computes with them."""
    folder, file = find_model("qwen-tiny").folder, benchmark("gguf_file")
    sizes = file.write_checkpoint(folder, tmp_path / "a.gguf", "f32", 1, tokenizer=True)
    stored = load_file(folder / "model.safetensors")
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert {tensor: value.nbytes for tensor, value in found.items()} == sizes
    head = torch.tensor(found["output.weight"].reshape(stored["lm_head.weight"].shape))
    assert torch.equal(head, stored["lm_head.weight"].float())
    rate = stored["model.layers.0.linear_attn.A_log"].float().exp()
    torch.testing.assert_close(torch.tensor(found["blk.0.ssm_a"]), -rate)
    norm = torch.tensor(found["blk.20.nextn.shared_head_norm.weight"])
    assert torch.equal(norm, stored["mtp.norm.weight"].float() + 1)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_gguf_is_read_as_it_was_meant(kind: str, tmp_path: Path) -> None:
    """Names, shapes and types; dequantised, values are as large as products want them."""
    file, c = benchmark("gguf_file"), dict(tiny(kind).raw)
    sizes = file.write_random(c, tmp_path / "tiny.gguf", "q4_0")
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf")
    found = {tensor.name: tensor for tensor in reader.tensors}
    shapes = {name: (*map(int, tensor.shape[::-1]),) for name, tensor in found.items()}
    assert shapes == file.find_shapes(c, 0)
    assert {name: t.n_bytes for name, t in found.items()} == sizes
    types = {name: t.tensor_type.name for name, t in found.items()}
    ends = {types[name] for name in ("token_embd.weight", "output.weight") if name in types}
    assert ends == {"Q8_0"}
    last = f"blk.{c['num_hidden_layers'] - 1}.attn_output.weight"
    assert types[last] == types["blk.0.ffn_up.weight"] == "Q4_0"
    assert types["blk.1.attn_norm.weight"] == "F32"
    up = found["blk.0.ffn_up.weight"]
    values = gguf.quants.dequantize(up.data, up.tensor_type)
    assert float(values.std()) == pytest.approx(256**-0.5, rel=0.05)
    assert abs(float(values.mean())) < 0.003


def test_a_saved_sequence_is_lengthened() -> None:
    """Rows are repeated, positions go on, and other streams stay empty."""
    lengthened = benchmark("llama_cpp_model").lengthened
    rows = [np.arange(6, dtype=np.uint8).reshape(2, 3) + 10 * i for i in range(2)]

    def saved(count: int) -> bytes:
        meta = b"".join(struct.pack("<iIi", i, 1, 0) for i in range(count))
        parts = [struct.pack("<IiII", 7, 0, 3, count), meta, struct.pack("<II", 0, 2)]
        parts += [struct.pack("<iQ", 1, 3) + np.resize(r, (count, 3)).tobytes() for r in rows]
        return b"".join(parts) + bytes(8)

    assert lengthened(saved(2), 5, np) == saved(5)


def test_bandwidth_is_of_the_bytes_that_are_read() -> None:
    figures = {"reading": [[1e7, 60.0], [1e9, 20.0]], "fp32": 1.0, "int8": 1.0}
    machine = benchmark("one.machine").machine_of(figures)
    found = [machine.bandwidth(size) for size in (0, 1e7, 1e8, 1e9, 1e10)]
    assert found == pytest.approx([60, 60, 40, 20, 20])


def test_ratios_stand_beside_their_aims() -> None:
    report = benchmark("one.report")
    reached = report.Row("step", "ms", (3.0, 2.0)).judge(1.5, report.Aim(1.6), 1.4)
    missed = report.Row("prompt", "tokens/s", (3.0, None, 9.0)).judge(0.5, report.Aim(1, True))
    assert reached.cells() == [
        "step, ms", "3", "-", "2", "-", "[green]1.50[/green]", "1.40", "<= 1.6",
    ]  # fmt: skip
    assert missed.cells()[1:] == ["3", "9", "-", "-", "[red]0.50[/red]", "-", ">= 1"]


def test_a_side_that_died_leaves_the_others_figures() -> None:
    measured = benchmark("one.sides").Measured(
        {
            "a": [{"first": {"first_s": 3.0}, "error": {"message": "ended with -9"}}],
            "b": [{"x": {"steps": [9, 9, s, s]}} for s in (1.0, 5.0, 2.0)],
        }
    )
    assert measured.first("a") == 3.0
    assert measured.step("a", "x") is None
    assert measured.step("b", "x") == 2.0
    assert measured.step("nobody", "x") is None


def test_the_limit_of_a_file_that_memory_does_not_hold() -> None:
    """Five of ten experts of 10 bytes are chosen twice as often, and memory holds them first."""
    larger, found = benchmark("one.larger"), benchmark("one.section").Found
    data: dict[str, Any] = {"file": 200.0, "experts": 100.0, "always": 50.0, "disk": 20.0}
    data["chosen"] = [*[0.2] * 5, *[0.1] * 5]
    missing = [larger.count_missing(data, share) for share in (1.0, 0.5, 0.3)]
    assert missing == pytest.approx([0, 5, 13])
    answer = {"counted": {"steps": [9, 9, 0.5, 1.5], "read": [9, 9, 8, 12]}, "held": {"bytes": 7e9}}
    name = larger.name_run("mtpbuild", larger.OWN, 0.5)
    table = larger.Larger().show_law("Zipf", found({**data, "rounds": {name: [answer]}}, None))
    cells = [[*column.cells] for column in table.columns]
    assert cells[1:] == [["250"], ["mtpbuild"], ["1e+03"], ["0.25"], ["1e-05"], ["0.5"], ["7"]]


def test_a_law_is_the_routers_rates() -> None:
    larger = benchmark("one.larger")
    rates = larger.choose_rates(larger.ZIPF, 8, 3)
    assert rates.sum() == pytest.approx(3)
    assert rates[0] == 1, "none is chosen twice"
    np.testing.assert_allclose(rates[1:] / rates[1], 2 / np.arange(2, 9))
    scores = 1 / (1 + np.exp(-np.random.default_rng(1).standard_normal((4096, 8))))
    best = np.argsort(scores + larger.find_biases(rates))[:, -3:]
    np.testing.assert_allclose(np.bincount(best.ravel()) / 4096, rates, atol=0.05)


def test_a_laws_biases_are_written_into_both_files(no_programs: Path, tmp_path: Path) -> None:
    larger, biases = benchmark("one.larger"), [*map(float, range(24))]
    out, weights = tmp_path / "tiny.gguf", no_programs / "weights.safetensors"
    benchmark("gguf_file").write_random(dict(tiny("moe").raw), out, "q4_0")
    before = {name: value.clone() for name, value in load_file(weights).items()}
    for path in (out, no_programs):
        larger.set_biases(path, biases)
    found = {t.name: t.data.tolist() for t in gguf.GGUFReader(out).tensors if "probs" in t.name}
    assert found == {"blk.1.exp_probs_b.bias": biases}
    changed = {n: v for n, v in load_file(weights).items() if not torch.equal(v, before[n])}
    assert {name: value.tolist() for name, value in changed.items()} == {
        f"{owner}.mlp.gate.e_score_correction_bias": biases for owner in ("layers.1", "mtp.0")
    }
    assert larger.count_held(weights) > 0


class Pretended:
    """A section that fails until it is told not to."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.asked = fails, 0

    def measure(self, run: Any) -> dict[str, Any]:
        self.asked += 1
        if self.fails:
            raise UsageError("no room")
        return {"rounds": {"side": [{"error": {"message": "ended with 1: why"}}]}}

    def tables(self, found: Any) -> list[Any]:
        return ["a table"]


def test_a_section_that_fails_loses_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = benchmark("one_machine")
    sections = {"good": Pretended(False), "bad": Pretended(True)}
    monkeypatch.setattr(script, "SECTIONS", sections)
    known = {
        "figures": {"reading": [[1e9, 1e9]], "fp32": 1e9, "int8": 1e9},
        "about": {"cpu": "cpu", "threads": 1, "date": "today"},
    }
    monkeypatch.setattr(script, "measure_machine", lambda threads: known)
    flags = ["--only", "good,bad", "--ours-alone", "--work", str(tmp_path / "w")]
    monkeypatch.setattr(sys, "argv", ["x", *flags, "--out", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit, match="not measured: bad"):
        script.main()
    shown = capsys.readouterr().out
    assert "a table" in shown
    assert "side ended with 1: why" in shown
    sections["bad"].fails = False
    script.main()
    assert [section.asked for section in sections.values()] == [1, 2]
    assert [*script.load(tmp_path / "out.json")] == ["good", "bad"]
    script.main()
    assert sections["bad"].asked == 2


@pytest.mark.parametrize(
    ("flags", "output"),
    [(["--only", "all"], "--only all: expected any of moe, dense, contexts"),
     (["--layers", "0"], "--layers 0: expected at least 1"),
     (["--peers-python", "nowhere"], "no nowhere: run tools/peers_env.sh")],
)  # fmt: skip
def test_a_mistake_is_one_line(
    flags: list[str], output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Python ends with: it prints a text and gives exit code 1."""
    script = benchmark("one_machine")
    monkeypatch.setattr(sys, "argv", ["one_machine.py", *flags])
    with pytest.raises(SystemExit) as end:
        script.run(script.main)
    (line,) = str(end.value.code).splitlines()
    assert output in line


def test_tables_of_a_section_that_nobody_answered() -> None:
    """What is known is printed."""
    script, section, machine = (benchmark(n) for n in ("one_machine", "one.section", "one.machine"))
    able = machine.Machine(((1e9, 1e9),), 1e9, 1e9)
    cost = {"bytes": 1e9, "products": 1.0, "attention": 1.0}
    names = (
        "nextn 0",
        "nextn 1",
        "nextn 3",
        "nextn 0, int8 caches",
        "drafting",
        "drafting, a quarter",
    )
    data: dict[str, Any] = {
        "whole": True, "layers": 26, "bits": 4.4, "most_on_disk": 0,
        "sizes": dict.fromkeys(names, 10**9), "row_bytes": dict.fromkeys(names, 4),
        "costs": dict.fromkeys(names, cost), "rounds": {},
    }  # fmt: skip
    recipes = ("deepseek-v4-flash-preview", "deepseek-v4-flash", "deepseek-v3.2")
    data |= {recipe: {"costs": {}, "rounds": {}} for recipe in recipes}
    data |= {"disk": 1e9, "file": 2e9, "experts": 1e9, "always": 5e8}
    data |= {law: {"chosen": [0.5, 0.5], "rounds": {}} for law in ("uniform", "Zipf")}
    console = Console(width=200)
    with console.capture() as captured:
        for one in script.SECTIONS.values():
            console.print(*one.tables(section.Found(data, able)))
    shown = captured.get()
    for output in ("<= 6.8", ">= 1.15", ">= 1.6", "32768 x 2"):
        assert output in shown
