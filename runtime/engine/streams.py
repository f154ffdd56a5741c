"""Running requests as iterators, for threads and for asyncio, and chats' answers on top of them."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Self

from mtpbuild.runtime.engine.driver import Driver
from mtpbuild.runtime.requests.answer import AnswerParser, ChatChunk, ChatResult
from mtpbuild.runtime.requests.request import Chunk, Request, Result


class Stream(Iterator[Chunk]):
    """A running request: iterate over its chunks, `cancel` it from any thread.

    Closing the stream, leaving its `with` block or dropping it also ends the request and frees its
    slot.
    """

    def __init__(self, driver: Driver, request: Request) -> None:
        self._driver, self._request = driver, request
        driver.submit(request)

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
        if self._request.error:
            raise self._request.error
        return self._request.result()

    def cancel(self) -> None:
        """End the request, unless it has ended; its last chunk's reason is "cancelled"."""
        self._driver.cancel(self._request)

    close = cancel

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # raised at the interpreter's exit
            self._driver.drop(self._request)


class AsyncStream(AsyncIterator[Chunk]):
    """A running request in asyncio; a cancelled task that waits for a chunk ends it."""

    def __init__(self, driver: Driver, request: Request) -> None:
        import asyncio  # here, because it is slow to import and few programs use it

        self._news = asyncio.Event()
        self._driver, self._request = driver, request
        request.listener = partial(driver.announce, asyncio.get_running_loop(), self._news.set)
        driver.submit(request, for_asyncio=True)

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

    def result(self) -> Result:
        """Return the whole result of a request that has ended."""
        return self._request.result()

    def cancel(self) -> None:
        """End the request, unless it has ended; its last chunk's reason is "cancelled"."""
        self._driver.cancel(self._request)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it has not begun, or the interpreter exits
            self._driver.drop(self._request)


class ChatStream(Iterator[ChatChunk]):
    """A running answer: iterate over its chunks, `cancel` it from any thread.

    Closing the stream, leaving its `with` block or dropping it also ends the request.
    """

    def __init__(self, stream: Stream, parser: AnswerParser) -> None:
        self._stream, self._parser = stream, parser

    def __next__(self) -> ChatChunk:
        return read_chunk(self._parser, next(self._stream))

    def result(self) -> ChatResult:
        """Wait for the end; return the whole answer, with the chunks that were already taken."""
        for _ in self:
            pass
        return ChatResult.of(self._stream.result(), self._parser)

    def cancel(self) -> None:
        """End the request, unless it has ended; its last chunk's reason is "cancelled"."""
        self._stream.cancel()

    close = cancel

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.cancel()


class AsyncChatStream(AsyncIterator[ChatChunk]):
    """A running answer in asyncio: iterate over its chunks with `async for`.

    A cancelled task that waits for a chunk ends the request, as does leaving the `async with` block
    or dropping the stream.
    """

    def __init__(self, stream: AsyncStream, parser: AnswerParser) -> None:
        self._stream, self._parser = stream, parser

    async def __anext__(self) -> ChatChunk:
        return read_chunk(self._parser, await anext(self._stream))

    async def result(self) -> ChatResult:
        """Wait for the end; return the whole answer, with the chunks that were already taken."""
        async for _ in self:
            pass
        return ChatResult.of(self._stream.result(), self._parser)

    def cancel(self) -> None:
        """End the request, unless it has ended; its last chunk's reason is "cancelled"."""
        self._stream.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        self.cancel()


def read_chunk(parser: AnswerParser, chunk: Chunk) -> ChatChunk:
    """Return a chunk's final pieces of an answer."""
    pieces = tuple(parser.take(chunk))
    reason = None if chunk.finish_reason is None else parser.reason
    return ChatChunk(pieces, parser.call_deltas(pieces), reason, chunk)
