"""The engine for users: load a directory, then generate, chat or stream."""

import contextlib
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from copy import copy
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from mtpbuild.runtime.engine.loaded import Chat, LoadedEngine, Prompt
from mtpbuild.runtime.engine.streams import AsyncChatStream, AsyncStream, ChatStream, Stream
from mtpbuild.runtime.errors import EngineError, RequestError, UsageError, explain_missing_package
from mtpbuild.runtime.requests.answer import ChatResult
from mtpbuild.runtime.requests.request import Chunk, Observer, Request, Result
from mtpbuild.runtime.requests.totals import MeteredModel, count_stats
from mtpbuild.runtime.sampling.params import SamplingParams

if TYPE_CHECKING:
    from mtpbuild.runtime.tool_calls import AnswerOptions

SWAPS = threading.Lock()


class Engine(LoadedEngine):
    """A loaded engine directory, for use by several threads and by asyncio.

    `manifest` says what it is, `tokenizer` turns texts into tokens (None: it has none), `folder` is
    where it was loaded from, and `totals` has the histograms of `metrics`.

        with Engine.load("engines/tiny_n3") as engine:
            print(engine.generate("def fibonacci(n):", SamplingParams(max_tokens=64)).text)
    """

    def __repr__(self) -> str:
        model, build, target = self.manifest.model.name, self.manifest.build, self.manifest.target
        place = "" if self.folder is None else f" from {str(self.folder)!r}"
        closed = ", closed" if self._driver.closed else ""
        return f"<Engine of {model}{place}: nextn {build.drafts}, {target.name}{closed}>"

    def swap(self, path: str | Path, **options: Any) -> None:
        """Load another engine directory in this one's place; `options` are those of `load`.

        Requests that come after it is loaded run on the new engine. Earlier ones end on the old
        one, and `swap` returns when they have. Until then both are in memory. If the new engine
        can't be loaded, the old one stays, and the error is raised. In `metrics` histograms and
        counters go on; `stats` are the new engine's own.

            engine.swap("engines/tiny_n2")

        It waits, so that asyncio's event loop needs `aswap`.
        """
        import asyncio  # here, because it is slow to import and few programs use it

        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            raise UsageError("engine.swap would stop the event loop: `await engine.aswap(...)`")
        new = type(self).load(path, **options)
        with SWAPS:
            old = copy(self)
            if old._driver.closed:
                new.close()
                raise EngineError("the engine is closed")
            new.totals = old.totals
            old.totals.ending.append(old)
            self.__dict__ = vars(new)
        try:
            old._driver.finish()
        finally:
            old.retire()

    async def aswap(self, path: str | Path, **options: Any) -> None:
        """Swap as `swap` does, in a thread, while the event loop goes on.

        A cancelled task does not stop it.
        """
        import asyncio

        await asyncio.to_thread(self.swap, path, **options)

    @contextlib.contextmanager
    def pinned(self) -> Iterator[Self]:
        """Yield the engine as it is now: a `swap` in the block does not change it.

        What prepares a request in several calls does so in one such block.
        """
        while True:
            engine = copy(self)
            with engine._driver.hold():
                if engine._driver is self._driver:  # else a swap came first, and does not wait
                    yield engine
                    return

    @overload  # a text is one prompt, although its type is also a sequence of texts
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        observer: Observer | None = None,
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        observer: Observer | None = None,
    ) -> list[Result]: ...

    def generate(
        self, prompt: Any, params: Any = None, *, observer: Observer | None = None
    ) -> Result | list[Result]:
        """Continue a prompt, or a list of prompts (then `params` may be a list of the same length).

            result = engine.generate("def f(x):", SamplingParams(max_tokens=8))
            one, other = engine.generate(["def f(x):", "def g(x):"])

        observer: sees each step, such as a `Trace`. Raises RequestError before any step has run,
        DeadlineError if a request takes longer than its `timeout`, EngineError if the programs
        fail; the other requests of a list then end, too.
        """
        several = isinstance(prompt, list | tuple)
        if not several or (prompt and isinstance(prompt[0], Integral)):
            return self.stream(prompt, params, observer=observer).result()
        settings = params if isinstance(params, Sequence) else [params] * len(prompt)
        if len(settings) != len(prompt):
            raise RequestError(f"{len(prompt)} prompts, but {len(settings)} sampling parameters")
        with contextlib.ExitStack() as stack:
            with self.pinned() as engine:
                pairs = zip(prompt, settings, strict=True)
                requests = [engine.prepare(*pair, observer=observer) for pair in pairs]
                streams = [stack.enter_context(Stream(engine._driver, each)) for each in requests]
            return [stream.result() for stream in streams]

    @overload
    def chat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        observer: Observer | None = None,
        **options: Unpack["AnswerOptions"],
    ) -> ChatResult: ...
    @overload
    def chat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        observer: Observer | None = None,
        **options: Unpack["AnswerOptions"],
    ) -> ChatStream: ...

    def chat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        observer: Observer | None = None,
        **options: Unpack["AnswerOptions"],
    ) -> ChatResult | ChatStream:
        """Answer a conversation, with thought, text and calls of tools apart, as the server does.

            messages = [{"role": "user", "content": "What is 47 + 85?"}]
            for chunk in engine.chat(messages, SamplingParams(max_tokens=64), stream=True):
                print(chunk.content, end="")

        stream: return at once; the answer's chunks come as they are generated. messages: as in
        OpenAI's API, or the prompt that `chat_ids` made of them. options: as for `chat_prompt`, and
        tool_choice ("auto", "none", "required" or a function), parallel_tool_calls=False for one
        call at most, and tool_call_parser, the form of the model's calls if its chat template does
        not show it. To continue the conversation, append the result's `message` to `messages`.
        """
        with self.pinned() as engine:
            request, parser = engine.prepare_chat(messages, params, observer, **options)
            answer = ChatStream(Stream(engine._driver, request), parser)
        if stream:
            return answer
        with answer:
            return answer.result()

    @overload
    async def achat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        observer: Observer | None = None,
        **options: Unpack["AnswerOptions"],
    ) -> ChatResult: ...
    @overload
    async def achat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        observer: Observer | None = None,
        **options: Unpack["AnswerOptions"],
    ) -> AsyncChatStream: ...

    async def achat(
        self,
        messages: Chat,
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        observer: Observer | None = None,
        **options: Unpack["AnswerOptions"],
    ) -> ChatResult | AsyncChatStream:
        """Answer a conversation in asyncio, with the options of `chat`.

        A cancelled task ends the request.

            answer = await engine.achat(messages)
            async for chunk in await engine.achat(messages, stream=True):
                print(chunk.content, end="")
        """
        import asyncio  # here, because it is slow to import and few programs use it

        with self.pinned() as engine:
            prepare = engine.prepare_chat
            request, parser = await asyncio.to_thread(
                prepare, messages, params, observer, **options
            )
            answer = AsyncChatStream(AsyncStream(engine._driver, request), parser)
        return answer if stream else await answer.result()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        observer: Observer | None = None,
    ) -> Stream:
        """Queue a prompt; iterate over the returned Stream for its chunks.

        observer: sees each step of the request, such as a `Trace`.
        """
        with self.pinned() as engine:
            return Stream(engine._driver, engine.prepare(prompt, params, observer=observer))

    async def astream(
        self,
        prompt: Prompt | Request,
        params: SamplingParams | None = None,
        *,
        observer: Observer | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Stream a prompt in asyncio; a cancelled task or closed generator ends the request.

        prompt: a prompt, or the request that `prepare` made from a prompt.
        """
        if isinstance(prompt, Request):
            chunks = AsyncStream(prompt.owner, prompt)
        else:
            with self.pinned() as engine:
                request = engine.prepare(prompt, params, observer=observer)
                chunks = AsyncStream(engine._driver, request)
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            chunks.cancel()

    def metrics(self, model_name: str | None = None) -> str:
        """Return the totals of all requests as Prometheus' text, under vLLM's names.

        model_name: a label; by default the model's name. It needs the package prometheus-client.
        """
        with explain_missing_package("engine.metrics()", "serve"):
            from mtpbuild.runtime.engine.metrics import write_metrics
        return write_metrics([self.meter(model_name or self.manifest.model.name)])

    def meter(self, name: str) -> MeteredModel:
        """Return the counts of this engine and of those whose place it took."""
        with SWAPS:
            stats, totals = self.stats, self.totals
            counts = totals.past.copy()
            for each in (stats, *(engine.stats for engine in totals.ending)):
                counts.update(count_stats(each))
            return MeteredModel(name, self.manifest.build, stats, counts, totals)

    def retire(self) -> None:
        """Leave the counts in `totals` to the engine that takes this one's place."""
        with SWAPS:
            self.totals.past.update(count_stats(self.stats))
            self.totals.ending = [each for each in self.totals.ending if each is not self]
