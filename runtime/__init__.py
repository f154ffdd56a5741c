"""The thin run time of an engine directory.

    from mtpbuild.runtime import Engine, SamplingParams

    with Engine.load("engines/tiny_n3") as engine:
        for chunk in engine.stream("def fibonacci(n):", SamplingParams(max_tokens=64)):
            print(chunk.text, end="", flush=True)
        result = engine.generate(engine.chat_prompt([{"role": "user", "content": "2 + 3?"}]))
        print(result.text, result.finish_reason, result.metrics.tokens_per_s)

Names are loaded on first use, so that `mtpbuild --help` needs neither numpy nor pydantic.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpbuild.runtime.driver import Stream
    from mtpbuild.runtime.engine import Engine
    from mtpbuild.runtime.errors import EngineError, MtpbuildError, RequestError
    from mtpbuild.runtime.manifest import Manifest
    from mtpbuild.runtime.request import Chunk, Result, TokenLogprobs
    from mtpbuild.runtime.sampling import SamplingParams
    from mtpbuild.runtime.stats import EngineStats, RequestMetrics, SpeculativeDecoding
    from mtpbuild.runtime.tokenizer import Tokenizer
    from mtpbuild.runtime.trace.recorder import Trace

__all__ = [
    "Chunk",
    "Engine",
    "EngineError",
    "EngineStats",
    "Manifest",
    "MtpbuildError",
    "RequestError",
    "RequestMetrics",
    "Result",
    "SamplingParams",
    "SpeculativeDecoding",
    "Stream",
    "TokenLogprobs",
    "Tokenizer",
    "Trace",
]

_MODULES = {
    "driver": ("Stream",),
    "engine": ("Engine",),
    "errors": ("EngineError", "MtpbuildError", "RequestError"),
    "manifest": ("Manifest",),
    "request": ("Chunk", "Result", "TokenLogprobs"),
    "sampling": ("SamplingParams",),
    "stats": ("EngineStats", "RequestMetrics", "SpeculativeDecoding"),
    "tokenizer": ("Tokenizer",),
    "trace.recorder": ("Trace",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
