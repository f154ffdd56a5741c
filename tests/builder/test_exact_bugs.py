"""Bugs planted into the CPU's kernels: each lets a text depend on what is computed beside it."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.runtime.programs import onnxruntime as programs
from tests.support.cpu_kernels import SOURCE, compiled
from tests.support.exact_engines import said, same, save
from tests.support.requests import build

pytestmark = [pytest.mark.full]
BLOCKS = "for (int64_t b = 0; b < panel.blocks; b++) {"
ADDED = "totals[m][v] = fma(sum, mul(scale, same(in[m][b].scale)), totals[m][v]);"
BUGS: dict[str, tuple[str, dict[str, str]]] = {
    "a lone row adds its blocks in another order": (
        "products.h",
        {
            BLOCKS: """for (int64_t n = 0; n < panel.blocks; n++) {
    int64_t b = ROWS == 1 ? panel.blocks - 1 - n : n;
    values = panel.values + 64 * first + b * 128 * BITS;
    scales = panel.scales + 16 * first + b * SCALES;"""
        },
    ),
    "a lone row has two totals": (
        "products.h",
        {
            BLOCKS: "Floats odd[2] = {same(0.0f), same(0.0f)};\n  " + BLOCKS,
            ADDED: f"""if (ROWS == 1 && b % 2) {{
          odd[v] = fma(sum, mul(scale, same(in[m][b].scale)), odd[v]);
        }} else {{
          {ADDED}
        }}""",
            "(first + v), totals[m][v]);": "(first + v), add(totals[m][v], odd[v]));",
        },
    ),
    "attention is cut in the middle of what its window's first row sees": (
        "attention.h",
        {
            "at < end; at += mtp::CHUNK) {": "at < end;) {",
            "count = last - at;\n": """count = 0;
    if (at < a.seen[0] / 2 && a.seen[0] / 2 < last) last = a.seen[0] / 2;
    count = last - at;
""",
            "    Floats factor = weigh(": "    at = last;\n    Floats factor = weigh(",
        },
    ),
}


def planted(sources: Path, bug: str | None) -> Path:
    """Copy the kernels' sources, with a bug."""
    shutil.copytree(SOURCE, sources)
    file, changes = ("ops.cpp", {}) if bug is None else BUGS[bug]
    text = (sources / file).read_text()
    for right, wrong in changes.items():
        assert text.count(right) == 1, right
        text = text.replace(right, wrong)
    (sources / file).write_text(text)
    return sources


@pytest.mark.parametrize("bug", [None, *BUGS])
def test_planted_bugs(bug: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled without one the texts are equal to the bit; with each of them they are not."""
    library = compiled(planted(tmp_path / "source", bug), tmp_path / "planted.so")
    monkeypatch.setattr(programs, "find_library_for", lambda *_: library)
    folder, scheme = save(tmp_path / "model", "few"), build_scheme("int4")
    whole = BuildRequest(str(folder), max_seq_len=160, scheme=scheme, nextn=(0,))
    pieces = replace(whole, nextn=(1,), prefill_chunk=5, max_batch=3, out=tmp_path / "many")
    alone, many = (build(r)[0].folder for r in (replace(whole, out=tmp_path / "alone"), pieces))
    wanted = said(alone, 12, at_once=False)
    assert same(said(many, 12, at_once=True), wanted) == (bug is None)
