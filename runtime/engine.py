"""The engine as its users see it: load a directory, then generate or stream."""

import contextlib
import logging
import operator
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Set
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, Self, TypeAlias, Unpack, cast, overload

from mtpbuild.runtime.chat_template import ChatOptions, Message
from mtpbuild.runtime.checks import shown
from mtpbuild.runtime.compiled_prefixes import open_pool
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import Manifest, check_files, read_manifest
from mtpbuild.runtime.contract.programs import Programs, Shared
from mtpbuild.runtime.controls_of import controls_of
from mtpbuild.runtime.driver import Driver, Stream
from mtpbuild.runtime.errors import (
    ContextLengthError,
    EngineError,
    EngineFileError,
    MtpbuildError,
    RequestError,
)
from mtpbuild.runtime.grammar import Grammars
from mtpbuild.runtime.group.start import own_folders
from mtpbuild.runtime.loop import Loop
from mtpbuild.runtime.prefix_pool import PrefixPool
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.reasoning import BEGIN, END, ThinkingSplitter, opens_thought
from mtpbuild.runtime.request import ChatResult, Chunk, Observer, Request, Result
from mtpbuild.runtime.sampling import SamplingParams
from mtpbuild.runtime.stats import EngineStats
from mtpbuild.runtime.tokenizer import Tokenizer, load_tokenizer
from mtpbuild.runtime.warm import warm_up

Prompt: TypeAlias = str | Sequence[int]  # text, or token ids that are taken as they are

log = logging.getLogger("mtpbuild")


class Engine:
    """Is an engine directory, ready to run; from several threads and from asyncio if you like."""

    def __init__(
        self,
        programs: Programs,
        manifest: Manifest,
        tokenizer: Tokenizer | None = None,
        *,
        overlap: bool = True,
        prefix_cache: bool = False,
        pool: PrefixPool | None = None,
    ) -> None:
        self.manifest = manifest
        self.tokenizer = tokenizer
        self._grammars = Grammars(manifest, tokenizer, programs.features)
        self._loop = Loop(programs, manifest, overlap=overlap, prefix_cache=prefix_cache, pool=pool)
        self._driver = Driver(self._loop)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        threads: int | None = None,
        verify_hashes: bool = False,
        overlap: bool = True,
        prefix_cache: bool = False,
        prefix_cache_bytes: int | None = None,
        prefix_cache_dir: str | Path | None = None,
        warm: Sequence[SamplingParams] = (),
        **options: Any,
    ) -> Self:
        """Check an engine directory and load it.

        threads: how many the target uses; None lets it choose. verify_hashes: check all bytes,
        whatever the size. overlap: where the target can, launch a step before the last one's tokens
        are read; False is for measuring. prefix_cache: a prompt that begins as one before it is
        filled in from where they differ, if the target can; tokens stay the same (but for near-ties
        if it is not exact), and the time to the first token depends on what came before.
        prefix_cache_bytes: of memory for what ended requests leave, beyond the slots; None: an
        eighth of what is free. prefix_cache_dir: a folder where it outlives this process, in as
        many bytes. Prefixes that the engine was built with are used in any case. warm: settings of
        requests to come, whose programs are loaded and run once now; nothing counts these runs.
        options: those of the engine's target, such as provider="cuda" (target onnxruntime) or
        no_cuda_graphs=True (target inductor: slower, and easier to debug); docs/targets.md lists
        them.

        Raises UsageError, EngineError or one of its kinds, with what to do.
        """
        if threads is not None and threads < 1:
            raise RequestError(f"threads must be a number from 1, not {threads}")
        if prefix_cache_bytes is not None and prefix_cache_bytes < 0:
            raise RequestError(f"prefix_cache_bytes must be from 0, not {prefix_cache_bytes}")
        folder = Path(path)
        manifest = read_manifest(folder)
        try:
            for place, own in own_folders(folder, manifest):
                check_files(place, own, verify_hashes=verify_hashes)
            tokenizer = load_tokenizer(folder, manifest)
            programs = load_programs(folder, manifest, threads=threads, **options)
            warm_up(programs, manifest, warm)
            log.info("loaded %s: %s, nextn %s", folder, manifest.target.name, manifest.build.drafts)
            limit = prefix_cache_bytes if prefix_cache else 0
            kept = prefix_cache_dir if prefix_cache else None
            pool = open_pool(programs, manifest, folder, limit, kept)
            return cls(
                programs, manifest, tokenizer, overlap=overlap, prefix_cache=prefix_cache, pool=pool
            )
        except OSError as error:
            raise EngineFileError(f"{folder}: can't be read ({error})") from None
        except MtpbuildError:
            raise
        except Exception as error:  # a manifest that parses and yet doesn't fit its programs
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise EngineError(f"{folder}: can't be loaded ({reason}); rebuild it") from error

    @overload  # a text is a sequence of texts too, but is one prompt
    def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Result: ...  # type: ignore[overload-overlap]
    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Result]: ...

    def generate(self, prompt: Any, params: Any = None) -> Result | list[Result]:
        """Continue a prompt, or a list of them (then `params` may be a list as long).

        Raises RequestError before anything has run, EngineError if the programs fail.
        """
        several = isinstance(prompt, list | tuple)
        if not several or (prompt and isinstance(prompt[0], Integral)):
            return self.stream(prompt, params).result()
        each = params if isinstance(params, Sequence) else [params] * len(prompt)
        if len(each) != len(prompt):
            raise RequestError(f"{len(prompt)} prompts, but {len(each)} sampling parameters")
        requests = [self._request(*pair) for pair in zip(prompt, each, strict=True)]
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(Stream(self._driver, r)) for r in requests]
            return [stream.result() for stream in streams]

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatResult:
        """Answer a conversation, with the thought and the rest of the text apart.

        options: as for `chat_prompt`. To go on, append the result's `message` to `messages`.
        """
        ids, params = self.chat_ids(messages, **options), _checked(params)
        marks = self.manifest.model.thinking_token_ids
        if marks is None:
            return ChatResult.of(self.stream(ids, params).result())
        special = self.special_ids
        named = [special[mark] for mark in (BEGIN, END) if mark in special]
        named = [*params.shown_tokens, *named]
        params = replace(params, shown_tokens=named, split_thought=True)
        splitter = ThinkingSplitter(marks, opens_thought(ids, marks, self.tokenizer))
        with self.stream(ids, params) as stream:
            spans = [span for chunk in stream for span in chunk.spans]
            pieces = [piece for span in spans for piece in splitter.feed(span)]
            return ChatResult.of(stream.result(), [*pieces, *splitter.finish()])

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        observer: Observer | None = None,
    ) -> Stream:
        """Queue a prompt; iterate over the returned Stream for its chunks.

        observer: is shown the request's steps; `Trace.request` gives one that writes them down.
        """
        return Stream(self._driver, self._request(prompt, params, observer=observer))

    async def astream(
        self, prompt: Prompt | Request, params: SamplingParams | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """`stream` for asyncio; cancelling the task or closing the generator ends the request.

        prompt: or what `prepare` made of one.
        """
        import asyncio  # here: every program would wait for it, few use it

        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def listener() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has been closed
                loop.call_soon_threadsafe(news.set)

        request = prompt if isinstance(prompt, Request) else self.prepare(prompt, params)
        request.listener = listener
        self._driver.submit(request, for_asyncio=True)
        try:
            while not request.ended or request.outbox:
                await news.wait()
                news.clear()
                while request.outbox:
                    yield request.outbox.popleft()
            if request.error:
                raise request.error
        finally:
            self._driver.cancel(request)

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Check a prompt and its settings in any thread, for one call of `astream`.

        This takes as long as the prompt and the form of its answer are, and waits for no step.
        """
        return self._request(prompt, params)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; RequestError if the engine was built without a tokenizer."""
        return self._text_tokenizer().encode(text, add_special_tokens=add_special_tokens)

    @property
    def special_ids(self) -> dict[str, int]:
        """Map the names of the special tokens that the model can emit to their ids."""
        named = self.tokenizer.special_ids if self.tokenizer else {}
        return {name: id for name, id in named.items() if id < self.manifest.model.vocab_size}

    def token_ids(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Returns a prompt's ids if vocabulary and capacity allow them; raises RequestError.

        add_special_tokens: whether a text gets the tokenizer's own, such as the BOS.
        """
        vocabulary, capacity = self.manifest.model.vocab_size, self.manifest.build.max_seq_len
        if not isinstance(prompt, str):
            ids = _plain_ids(prompt)
        elif prompt and self._text_tokenizer().exceeds(prompt, capacity):
            raise ContextLengthError(None, capacity)
        else:
            ids = self.encode(prompt, add_special_tokens=add_special_tokens) if prompt else []
        if not ids:
            raise RequestError("the prompt is empty")
        for id in (min(ids), max(ids)):
            if not 0 <= id < vocabulary:
                wrong = f"token id {shown(id)} is outside the vocabulary"
                raise RequestError(f"{wrong} 0..{vocabulary - 1}")
        if len(ids) >= capacity:
            raise ContextLengthError(len(ids), capacity)
        return ids

    def chat_prompt(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        """Returns the prompt for the next answer in a conversation, by the model's template.

        options: tools, documents, add_generation_prompt, continue_final_message and
        chat_template_kwargs, as `apply_chat_template` of transformers takes them. The prompt
        contains its special tokens; `generate` and `stream` don't add a second BOS.
        """
        return self._text_tokenizer().chat_prompt(messages, **options)

    def chat_ids(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> list[int]:
        """`chat_prompt` as checked token ids, with no special tokens but the template's."""
        return self.token_ids(self.chat_prompt(messages, **options), add_special_tokens=False)

    def check(self, params: SamplingParams, *, form: bool = True) -> None:
        """Raise RequestError for settings that this engine can't do, whatever the prompt.

        MissingDependencyError for a grammar, if nothing is installed that could follow it. form:
        whether to compile what its steps are held to, which may take a second.
        """
        controls = controls_of([0], params, self.manifest)
        if form:
            self._grammars.holding(params, controls)

    @property
    def stats(self) -> EngineStats:
        """Totals of all requests so far."""
        admitted, build = self._loop.scheduler.admitted, self.manifest.build
        running = sum(not request.cancelled for request in admitted)
        rows = build.slots * build.max_seq_len
        acceptance, prefixes = self._loop.acceptance, self._loop.prefixes
        pool = prefixes.pool
        return EngineStats(
            requests_running=running,
            requests_waiting=len(self._loop.scheduler.waiting),
            requests_ended=self._loop.requests - running,
            prompt_tokens=self._loop.prompt_tokens,
            output_tokens=acceptance.tokens,
            speculative_decoding=acceptance.report(),
            prefix_queries=prefixes.queries,
            prefix_hits=prefixes.hits,
            prefix_bytes=pool.used if pool else 0,
            prefix_limit=pool.limit if pool else 0,
            num_drafts=acceptance.drafts,
            cache_usage=sum(request.length for request in admitted) / rows,
            step_tokens=dict(self._loop.step_tokens),
        )

    @property
    def failure(self) -> str | None:
        """Why the engine can't go on, if that is known before a step fails; None if it can.

        A rank is gone, the thread that steps for asyncio has died, or the process was forked.
        """
        programs = self._loop.programs
        shared = Feature.SHARE in programs.features
        return self._driver.failure or (cast(Shared, programs).failure if shared else None)

    def reset_prefix_cache(self) -> None:
        """Forget what earlier prompts left: the next ones are filled in from their beginning."""
        self._driver.between_steps(self._loop.forget)

    def close(self) -> None:
        """End all requests (who waits for one gets an EngineError); drop programs and weights."""
        self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        listener: Callable[[], None] = lambda: None,
        observer: Observer | None = None,
    ) -> Request:
        ids, params = self.token_ids(prompt), _checked(params)
        if params.stop and self.tokenizer is None:
            raise RequestError("this engine was built without a tokenizer: it has no stop strings")
        request = Request(ids, params, self.manifest, self.tokenizer, listener, observer)
        request.grammar = self._grammars.holding(params, request.controls)
        return request

    def _text_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this engine was built without a tokenizer: give token ids")
        return self.tokenizer


def _checked(params: SamplingParams | None) -> SamplingParams:
    """Return the settings, by default those of nobody's wishes; raises RequestError."""
    if not isinstance(params, SamplingParams | None):
        raise RequestError(f"settings are given as SamplingParams, not {shown(params)}")
    return SamplingParams() if params is None else params


def _plain_ids(prompt: Sequence[int]) -> list[int]:
    with contextlib.suppress(TypeError):
        ids = list(prompt)
        if not isinstance(prompt, bytes | Mapping | Set) and bool not in set(map(type, ids)):
            return list(map(operator.index, ids))
    raise RequestError(f"a prompt is a text or a list of token ids, not {shown(prompt)}")
