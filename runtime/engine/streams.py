"""Running requests as iterators, for threads and for asyncio, and chats' answers on top of them."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Self

from mtpbuild.runtime.engine.driver import Driver
from mtpbuild.runtime.requests.answer import AnswerParser, ChatChunk, ChatResult
from mtpbuild.runtime.requests.request import Chunk, Request, Result


class RunningRequest:
    """A request that its engine's driver runs, unless it has ended.

    Closing it, leaving its `with` block or dropping it ends the request and frees its slot.
    """

    def __init__(self, request: Request) -> None:
        self._driver: Driver = request.owner
        self._request = request

    def cancel(self) -> None:
        """End the request, unless it has ended; its last chunk's reason is "cancelled"."""
        self._driver.cancel(self._request)

    close = cancel

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it has not begun, or the interpreter exits
            self._driver.drop(self._request)


class Stream(RunningRequest, Iterator[Chunk]):
    """A running request: iterate over its chunks, `cancel` it from any thread.

    Closing the stream, leaving its `with` block or dropping it also ends the request and frees its
    slot.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._driver.submit(request)

    def __next__(self) -> Chunk:
        request = self._request
        if not (request.outbox or request.ended):
            self._driver.step_until(lambda: bool(request.outbox) or request.ended)
        if request.outbox:
            return request.outbox.popleft()
        if request.error:
            raise request.error
        raise StopIteration

    def result(self) -> Result:
        """Wait for the end; return the whole result, with the chunks that were already taken."""
        self._driver.step_until(lambda: self._request.ended)
        return self._request.result()


class AsyncStream(RunningRequest, AsyncIterator[Chunk]):
    """A running request in asyncio; a cancelled task that waits for a chunk ends it."""

    def __init__(self, request: Request) -> None:
        import asyncio  # here, because it is slow to import and few programs use it

        super().__init__(request)
        self._news = asyncio.Event()
        loop = asyncio.get_running_loop()
        request.listener = partial(self._driver.announce, loop, self._news.set)
        self._driver.submit(request, for_asyncio=True)

    async def __anext__(self) -> Chunk:
        request = self._request
        try:
            while not (request.outbox or request.ended):
                await self._news.wait()
                self._news.clear()
        except BaseException:
            self.cancel()
            raise
        chunk = request.outbox.popleft() if request.outbox else None
        if request.ended and not request.outbox:
            self.cancel()  # the driver forgets it
        if chunk is not None:
            return chunk
        if request.error:
            raise request.error
        raise StopAsyncIteration


class ChatStream(RunningRequest, Iterator[ChatChunk]):
    """A running answer: iterate over its chunks, `cancel` it from any thread.

    Closing the stream, leaving its `with` block or dropping it also ends the request.
    """

    def __init__(self, request: Request, parser: AnswerParser) -> None:
        super().__init__(request)
        self._chunks, self._parser = Stream(request), parser

    def __next__(self) -> ChatChunk:
        return self._parser.read_chunk(next(self._chunks))

    def result(self) -> ChatResult:
        """Wait for the end; return the whole answer, with the chunks that were already taken."""
        for _ in self:
            pass
        return ChatResult.of(self._request.result(), self._parser)


class AsyncChatStream(RunningRequest, AsyncIterator[ChatChunk]):
    """A running answer in asyncio: iterate over its chunks with `async for`.

    A cancelled task that waits for a chunk ends the request, as does leaving the `async with` block
    or dropping the stream.
    """

    def __init__(self, request: Request, parser: AnswerParser) -> None:
        super().__init__(request)
        self._chunks, self._parser = AsyncStream(request), parser

    async def __anext__(self) -> ChatChunk:
        return self._parser.read_chunk(await anext(self._chunks))

    async def result(self) -> ChatResult:
        """Wait for the end; return the whole answer, with the chunks that were already taken."""
        async for _ in self:
            pass
        return ChatResult.of(self._request.result(), self._parser)
