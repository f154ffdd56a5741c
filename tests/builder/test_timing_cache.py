"""TensorRT's measurements between builds: kept per version and GPU, never in the way."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtpbuild.builder.targets.tensorrt.compiling import find_timing_cache, keep_timing_cache
from tests.support.fake_tensorrt import DAMAGED, FOREIGN, Config

TRT: Any = SimpleNamespace(__version__="11.0.0.114")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mtpbuild"


def known_to_a_build(capability: str = "9.0") -> bytes:
    config = Config()
    with keep_timing_cache(TRT, config, capability):
        return config.timings


def test_a_build_knows_what_earlier_ones_measured(cache: Path) -> None:
    assert [known_to_a_build() for _ in range(3)] == [b"", b"+", b"++"]
    assert known_to_a_build("10.0") == b""
    assert sorted(path.name for path in cache.iterdir()) == [
        "tensorrt-11.0.0.114-sm100.timing",
        "tensorrt-11.0.0.114-sm90.timing",
    ]


@pytest.mark.parametrize("there", [DAMAGED, FOREIGN])
def test_what_does_not_fit_is_replaced(there: bytes, cache: Path) -> None:
    cache.mkdir()
    find_timing_cache("11.0.0.114", "9.0").write_bytes(there)
    assert known_to_a_build() == b""
    assert find_timing_cache("11.0.0.114", "9.0").read_bytes() == b"+"


def test_a_build_that_fails_leaves_it_alone(cache: Path) -> None:
    known_to_a_build()
    with pytest.raises(ZeroDivisionError), keep_timing_cache(TRT, Config(), "9.0"):
        _ = 1 / 0
    assert find_timing_cache("11.0.0.114", "9.0").read_bytes() == b"+"
    assert len(list(cache.iterdir())) == 1


def test_no_place_for_it_is_a_note(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("a file where the folder should be")
    assert known_to_a_build() == b""
    path = find_timing_cache("11.0.0.114", "9.0")
    assert set(caplog.messages) == {f"note: no timing cache at {path} (File exists)"}
