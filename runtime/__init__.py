"""The runtime of an engine directory.

    from mtpbuild.runtime import Engine, SamplingParams

    with Engine.load("engines/tiny_n3") as engine:
        for chunk in engine.stream("def fibonacci(n):", SamplingParams(max_tokens=64)):
            print(chunk.text, end="", flush=True)
        answer = engine.chat([{"role": "user", "content": "2 + 3?"}])
        print(answer.content, answer.finish_reason, answer.metrics.tokens_per_s)

Names are imported on first use, so that `mtpbuild --help` needs neither numpy nor pydantic.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtpbuild.runtime.contract.manifest import Manifest as Manifest
    from mtpbuild.runtime.engine.engine import Engine as Engine
    from mtpbuild.runtime.engine.streams import AsyncChatStream as AsyncChatStream
    from mtpbuild.runtime.engine.streams import ChatStream as ChatStream
    from mtpbuild.runtime.engine.streams import Stream as Stream
    from mtpbuild.runtime.errors import DeadlineError as DeadlineError
    from mtpbuild.runtime.errors import EngineError as EngineError
    from mtpbuild.runtime.errors import MtpbuildError as MtpbuildError
    from mtpbuild.runtime.errors import RequestError as RequestError
    from mtpbuild.runtime.requests.answer import ChatChunk as ChatChunk
    from mtpbuild.runtime.requests.answer import ChatResult as ChatResult
    from mtpbuild.runtime.requests.request import Chunk as Chunk
    from mtpbuild.runtime.requests.request import Observer as Observer
    from mtpbuild.runtime.requests.request import Result as Result
    from mtpbuild.runtime.requests.request import TokenLogprobs as TokenLogprobs
    from mtpbuild.runtime.requests.stats import EngineStats as EngineStats
    from mtpbuild.runtime.requests.stats import RequestMetrics as RequestMetrics
    from mtpbuild.runtime.requests.stats import SpeculativeDecoding as SpeculativeDecoding
    from mtpbuild.runtime.sampling.params import SamplingParams as SamplingParams
    from mtpbuild.runtime.sampling.structured_outputs import StructuredOutputs as StructuredOutputs
    from mtpbuild.runtime.text.tokenizer import Tokenizer as Tokenizer
    from mtpbuild.runtime.trace.recorder import Trace as Trace

_MODULES = {
    "contract.manifest": ("Manifest",),
    "engine.engine": ("Engine",),
    "engine.streams": ("AsyncChatStream", "ChatStream", "Stream"),
    "errors": ("DeadlineError", "EngineError", "MtpbuildError", "RequestError"),
    "requests.answer": ("ChatChunk", "ChatResult"),
    "requests.request": ("Chunk", "Observer", "Result", "TokenLogprobs"),
    "requests.stats": ("EngineStats", "RequestMetrics", "SpeculativeDecoding"),
    "sampling.params": ("SamplingParams",),
    "sampling.structured_outputs": ("StructuredOutputs",),
    "text.tokenizer": ("Tokenizer",),
    "trace.recorder": ("Trace",),
}
__all__ = sorted(name for names in _MODULES.values() for name in names)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
