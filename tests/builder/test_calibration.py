"""Calibrated int4: GPTQ against its definition, layers one by one against the whole model."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mtpbuild.builder.compiler.calibrate import state_folder
from mtpbuild.builder.formats.integers import BLOCK, INT4
from mtpbuild.builder.models import load_config
from mtpbuild.builder.models.common.copies import HEAD
from mtpbuild.builder.weights import calibration
from mtpbuild.builder.weights.calibration import Calibration, InputSums
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.builder.weights.gptq import DAMPING, correct_errors, encode_calibrated
from mtpbuild.builder.weights.layer_passes import make_batches
from mtpbuild.builder.weights.quantised_view import QuantisedView, requantise
from mtpbuild.builder.weights.scheme import Scheme
from mtpbuild.lab.verify.plain import load_plain
from mtpbuild.runtime.contract.manifest import WEIGHTS
from tests.support.checkpoints import QUANTIZABLE, random_checkpoint, write_tokenizer
from tests.support.exact_engines import save
from tests.support.families import make_family, save_family
from tests.support.invoke import invoke

ALL_INT4 = Scheme("int4", "int4", head="int4", exclude=())
FITTING: dict[str, Any] = {  # columns that split into blocks
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = ("glm-4.6", "mimo", "qwen3.5", "qwen3.5-moe")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return random_checkpoint(tmp_path_factory.mktemp("model") / "model", **QUANTIZABLE)


def texts(count: int = 12) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    lengths = [20 + 3 * i for i in range(count)]
    return [torch.randint(61, (n,), generator=draw).tolist() for n in lengths]


def view_of(folder: Path, scheme: Scheme = ALL_INT4) -> QuantisedView:
    stored = open_checkpoint(folder)
    config = stored.settle(load_config(folder))
    return requantise(stored, config, scheme, stored.check(config).stored.values())


def calibration_of(
    folder: Path, state: Path, watch: Callable[[str], None] = lambda text: None
) -> Calibration:
    view = view_of(folder)
    config = view.source.settle(load_config(folder))
    state.mkdir(exist_ok=True)
    return Calibration(view, config, make_batches(texts()), state, watch)


def inputs(count: int = 500, width: int = 96) -> Tensor:
    """Correlated inputs of very different sizes."""
    draw = torch.Generator().manual_seed(1)
    mixed = torch.randn(count, width, generator=draw) @ torch.randn(width, width, generator=draw)
    return mixed * torch.rand(width, generator=draw)


def weights(rows: int = 24, width: int = 96) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(2))


# GPTQ


def by_definition(weight: Tensor, hessian: Tensor) -> Tensor:
    """Round column by column; the later ones become the best answer to the error so far."""
    w, H = weight.double().clone(), hessian.double()
    H = H + DAMPING * H.diagonal().mean() * torch.eye(len(H))
    rounded = torch.zeros_like(w)
    for k in range(len(H)):
        if k % BLOCK == 0:
            scale = INT4.fit_scales(w[:, k : k + BLOCK].float()).squeeze(-1)
        codes = INT4.codes(w[:, k].float(), scale)
        rounded[:, k] = (codes.double() - INT4.zero) * scale.double()
        error, rest = w[:, k] - rounded[:, k], slice(k + 1, None)
        # argmin over d of (e, d) H (e, d)^T, where e is fixed: d = -H_rest^-1 h e
        w[:, rest] += error[:, None] * torch.linalg.solve(H[rest, rest], H[rest, k])
    return rounded.float()


def test_it_is_what_its_definition_says() -> None:
    x, w = inputs(), weights()
    wanted = by_definition(w, x.T @ x)
    found = INT4.decode(encode_calibrated(INT4, w, correct_errors(x.T @ x)))
    assert ((found - wanted).abs() > 1e-6).float().mean() < 0.01
    plain = INT4.decode(INT4.encode(w))
    assert ((plain - wanted).abs() > 1e-6).float().mean() > 0.1


def test_its_products_are_nearer_than_the_plain_rules() -> None:
    x, w = inputs(), weights()
    found = INT4.decode(encode_calibrated(INT4, w, correct_errors(x.T @ x)))
    plain = INT4.decode(INT4.encode(w))
    errors = [((rounded - w) @ x.T).square().sum().item() for rounded in (found, plain)]
    assert errors[0] < 0.7 * errors[1]


def test_inputs_that_say_nothing() -> None:
    """Inputs that are always 0, that are alike, or that are few."""
    w = weights()
    for x in (torch.zeros(5, 96), inputs()[:3], inputs() * (torch.arange(96) > 5)):
        found = INT4.decode(encode_calibrated(INT4, w, correct_errors(x.T @ x)))
        assert (found - w).abs().max() < 1


# Layers


def whole_model(folder: Path, batches: list[Tensor]) -> dict[str, Tensor]:
    """Calibrate with the whole plain model in memory, each product by itself."""
    plain: Any = load_plain(folder)
    sums = dict[str, Tensor]()
    layers = plain.model.layers
    streams = dict[str, Tensor]()  # the results of the trunk's layers

    def watch(names: list[str], run: Callable[[], Tensor]) -> Tensor:
        inputs = list[tuple[str, Tensor]]()
        hooks = [
            products[name].register_forward_pre_hook(
                lambda module, operands, name=name: inputs.append((name, operands[0]))
            )
            for name in names
        ]
        hooks += [
            layer.register_forward_hook(
                lambda module, operands, result, name=f"model.layers.{i}.": streams.update(
                    {name: result}
                )
            )
            for i, layer in enumerate(layers[: plain.config.num_hidden_layers])
        ]
        result = run()
        for each in hooks:
            each.remove()
        for name, x in inputs:
            stream = next((y for at, y in streams.items() if name.startswith(at)), result)
            norms = stream.norm(dim=-1, keepdim=True)
            if re.search(r"(o|out|down)_proj$", name) and x.shape[:-1] == stream.shape[:-1]:
                x = x * (norms.median() / norms)
            rows = x.flatten(0, -2)
            sums[name] = sums.get(name, torch.zeros(())) + rows.T @ rows
        return result

    products = {n: part for n, part in plain.named_modules() if isinstance(part, nn.Linear)}
    modules = [n for n in products if n != "lm_head"]
    with torch.no_grad():
        for tokens in batches:
            hidden = watch(modules, lambda t=tokens: plain.main(t))  # type: ignore[misc]
            watch(["lm_head"], lambda h=hidden: plain.logits(h))  # type: ignore[misc]
            for k in range(1, plain.config.num_nextn_predict_layers + 1):
                g, t = hidden[:, : tokens.shape[1] - k], tokens[:, k:]
                hidden = watch(modules, lambda k=k, t=t, g=g: plain.mtp(k, t, g))  # type: ignore[misc]
    found = dict[str, Tensor]()
    for name, total in sums.items():
        weight = products[name].weight.data
        if weight.shape[1] % BLOCK == 0:
            parts = encode_calibrated(INT4, weight, correct_errors(total))
            found[f"{name}.weight"] = INT4.decode(parts)
    return found


@pytest.mark.parametrize(
    "name",
    [
        "mimo",
        "gemma4-mixture",
        "gemma4-small",
        *(pytest.param(n, marks=pytest.mark.full) for n in FAMILIES if n != "mimo"),
    ],
)
def test_layers_are_calibrated_as_in_the_whole_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(calibration, "LEAST_TOKENS", 1)
    if name in FAMILIES:
        folder = save_family(tmp_path / "model", name, make_family(name, **FITTING), **FITTING)
    else:
        folder = save(tmp_path / "model", name)
    found = calibration_of(folder, tmp_path / "state")
    done, wanted = found.run(), whole_model(folder, [*found.batches])
    assert (HEAD in done.calibrated) != found.config.tie_word_embeddings
    for weight in done.calibrated:
        same = (done.read(weight) - wanted[weight]).abs() < 1e-5
        assert same.float().mean() > 0.97, weight  # sums in another order may round another way
    int4 = {name for name in wanted if found.view.formats.get(name) is INT4}
    assert set(done.calibrated) == int4  # of experts, those that saw a token


def test_products_with_the_same_input_share_its_sum(model: Path, tmp_path: Path) -> None:
    sums, x, y = InputSums(), inputs(8), inputs(4)
    parts = {name: nn.Linear(96, 4) for name in ("a", "b", "c")}

    def run() -> Tensor:
        parts["a"](x), parts["b"](x), parts["c"](y)
        return y

    for _ in range(2):
        assert sums.add_run(parts, run) is y
    assert sums.first == {"a": "a", "b": "a", "c": "c"}
    assert sums.counts == {"a": 16, "c": 8}
    torch.testing.assert_close(sums.sums["a"], 2 * x.T @ x)


def test_rare_experts_are_rounded_plainly(model: Path, tmp_path: Path) -> None:
    found = calibration_of(model, tmp_path / "state")
    done = found.run()
    rare = set(found.wanted) - set(done.calibrated)
    assert rare
    assert all(".experts." in name for name in rare)
    assert any(".experts." in name for name in done.calibrated)
    for name in rare:
        assert torch.equal(done.read(name), found.view.read(name))


def test_a_calibration_goes_on(model: Path, tmp_path: Path) -> None:
    """It ends after each step in turn, and the bytes are those of one that never ended."""
    wanted = calibration_of(model, tmp_path / "whole").run()
    names = list[str]()

    def end(text: str) -> None:
        names.append(text.partition(" (")[0])
        if names.count(names[-1]) == 1:
            raise KeyboardInterrupt

    while True:
        try:
            done = calibration_of(model, tmp_path / "state", end).run()
            break
        except KeyboardInterrupt:
            continue
    steps = ["calibrate layer 0", "calibrate layer 1", "calibrate head", "calibrate MTP module 1"]
    assert names == [step for step in steps for _ in range(2)]
    for name, path in wanted.calibrated.items():
        assert load_file(path).keys() == load_file(done.calibrated[name]).keys()
        assert torch.equal(done.parts(name)[""], wanted.parts(name)[""])
        assert torch.equal(done.parts(name)["_scale"], wanted.parts(name)["_scale"])
    assert len([*(tmp_path / "state").glob("hidden-*")]) == 1


def test_texts_become_batches_of_like_length() -> None:
    lengths = (30, 4, 0, 31, 33, 1000, 1001, 1050)
    shapes = [tuple(batch.shape) for batch in make_batches([[1] * n for n in lengths])]
    assert shapes == [(1, 4), (2, 30), (1, 33), (2, 1000), (1, 1050)]


# Commands


@pytest.mark.usefixtures("quick")
def test_build_and_quantize_write_the_same_weights(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tokenizer(model / "tokenizer.json", 61)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"t{ids[0]}" for ids in texts()) * 30)
    monkeypatch.setattr(
        "mtpbuild.builder.compiler.calibrate.cut_text", lambda path, folder: texts()
    )
    flags = ("--calibration-text", text)
    code, _, err = invoke(
        "quantize", "--model", model, "--to", "int4", "--head", "int8", "--out", "q", *flags
    )
    assert code == 0, err
    assert "30 of 63 int4 weights with 426 tokens" in caplog.text
    assert not state_folder(Path("q")).exists()
    for out, source, how in (("calibrated", model, flags), ("written", "q", ())):
        quantised = ("--weights", "int4") if how else ()
        code, _, err = invoke(
            "build", "--model", source, "--nextn", "0", "--out", out, *quantised, *how
        )
        assert code == 0, err
    built, written = (load_file(Path(name) / WEIGHTS) for name in ("calibrated", "written"))
    shared = [name for name in built if "eh_proj" not in name]
    assert shared == [name for name in written if "eh_proj" not in name]
    assert all(torch.equal(built[name], written[name]) for name in shared)
    code, _, err = invoke(
        "build", "--model", model, "--nextn", "0", "--out", "plain", "--weights", "int4"
    )
    plain, calibrated = (Path(name) / WEIGHTS for name in ("plain", "calibrated"))
    assert plain.stat().st_size == calibrated.stat().st_size
    assert plain.read_bytes() != calibrated.read_bytes()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--weights", "int8", "--calibrate"), "--calibrate is for int4: other formats need no"),
        (("--calibrate",), "--calibrate is for int4"),
        (("--weights", "int4", "--calibration-text", "none.txt"), "none.txt: no such file"),
    ],
)
def test_refusals(flags: tuple[str, ...], why: str, model: Path) -> None:
    code, _, err = invoke("build", "--model", model, "--nextn", "0", *flags)
    assert code == 2
    assert why in err
    assert len(err.splitlines()) == 1
