"""The engine for users: load a directory, then generate, chat or stream."""

import contextlib
import logging
import operator
import os
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, Unpack, cast, overload

from mtpbuild.runtime.checks import format_value
from mtpbuild.runtime.contract.manifest import Manifest, check_files, read_manifest
from mtpbuild.runtime.contract.programs import Programs
from mtpbuild.runtime.engine.loaded import Chat, LoadedEngine, Prompt, limit_context, warm_up
from mtpbuild.runtime.engine.loop import Loop
from mtpbuild.runtime.engine.step_times import LOAD_SECONDS, StepTimes, open_step_times
from mtpbuild.runtime.engine.streams import AsyncChatStream, AsyncStream, ChatStream, Stream
from mtpbuild.runtime.errors import (
    ContextLengthError,
    EngineError,
    EngineFileError,
    MtpbuildError,
    RequestError,
    UsageError,
    explain_missing_package,
    take_first_line,
)
from mtpbuild.runtime.group.start import find_own_folders
from mtpbuild.runtime.prefix_cache.cache import PrefixCache, open_prefix_cache
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.requests.answer import AnswerParser, ChatResult
from mtpbuild.runtime.requests.request import Chunk, Observer, Request, Result
from mtpbuild.runtime.requests.stats import EngineStats
from mtpbuild.runtime.requests.step_controls import make_step_controls
from mtpbuild.runtime.requests.totals import MeteredModel, RequestTotals
from mtpbuild.runtime.sampling.params import SamplingParams
from mtpbuild.runtime.text.chat_template import ChatOptions, Message
from mtpbuild.runtime.text.messages import render_messages
from mtpbuild.runtime.text.thought_marks import THOUGHT_TOKENS
from mtpbuild.runtime.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from mtpbuild.runtime.tool_calls.tool_use import AnswerOptions, ToolUse  # few requests need it

    class ChatArguments(AnswerOptions, total=False):
        """The options of a conversation and its answer, and who observes the answer's steps."""

        observer: Observer | None


Params: TypeAlias = SamplingParams | None
log = logging.getLogger("mtpbuild")


class Engine:
    """A loaded engine directory, for use by several threads and by asyncio.

    `totals` has the histograms of `metrics`.

        with Engine.load("engines/tiny_n3") as engine:
            print(engine.generate("def fibonacci(n):", SamplingParams(max_tokens=64)).text)
    """

    def __init__(
        self,
        programs: Programs,
        manifest: Manifest,
        tokenizer: Tokenizer | None = None,
        *,
        folder: Path | None = None,
        overlap: bool = True,
        prefix_cache: PrefixCache | None = None,
        step_times: StepTimes | None = None,
        chunked_prefill_size: int | None = None,
    ) -> None:
        loop = Loop(
            programs,
            manifest,
            overlap=overlap,
            prefix_cache=prefix_cache,
            step_times=step_times,
            chunked_prefill_size=chunked_prefill_size,
        )
        self._loaded = LoadedEngine(
            manifest=manifest, tokenizer=tokenizer, loop=loop, folder=folder
        )
        self.totals = RequestTotals(manifest.build.max_seq_len)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        threads: int | None = None,
        max_seq_len: int | None = None,
        verify_hashes: bool = False,
        overlap: bool = True,
        prefix_cache: bool = True,
        prefix_cache_bytes: int | None = None,
        prefix_cache_dir: str | Path | None = None,
        chunked_prefill_size: int | None = None,
        warm: Sequence[SamplingParams] = (),
        chat_template: str | Path | None = None,
        **options: Any,
    ) -> Self:
        """Check an engine directory and load it.

            engine = Engine.load("engines/tiny_n3", threads=1)

        Raises UsageError, EngineError or one of its subclasses, with what to do.

        Args:
            path: the engine directory.
            threads: CPU threads of the target; None lets it choose.
            max_seq_len: prompt and output tokens of a request together, at most as many as the
                engine was built for; None: as many.
            verify_hashes: hash all files, whatever their size.
            overlap: launch a step before the tokens of the step before it are read, if the target
                can; False is for measurements.
            prefix_cache: reuse the rows of earlier prompts with the same beginning, if the target
                can. Tokens stay the same (except at near-ties if the engine is not exact), but the
                time to the first token depends on earlier requests: False is for measurements.
            prefix_cache_bytes: memory of the host for these rows; None: an eighth of the free
                memory, or enough for one conversation of max_seq_len tokens, but at most half of
                it.
            prefix_cache_dir: a folder that keeps these rows for later processes, up to the same
                number of bytes. Prefixes that were added to the engine are always used.
            chunked_prefill_size: tokens of a prompt that are filled in between two steps of other
                requests, at most as many as the engine's chunks have; None: as many. Fewer make the
                steps come sooner, and the prompt take longer.
            warm: settings of later requests, whose programs are loaded and run once now;
                statistics ignore these runs.
            chat_template: a Jinja file in place of the engine's chat templates.
            **options: those of the engine's target, such as provider="cuda" (target onnxruntime)
                or no_cuda_graphs=True (target inductor: slower, easier to debug); docs/targets.md
                lists them.
        """
        for name, number, least in (
            ("threads", threads, 1),
            ("prefix_cache_bytes", prefix_cache_bytes, 0),
            ("chunked_prefill_size", chunked_prefill_size, 1),
        ):
            if number is not None and number < least:
                raise UsageError(f"{name} must be from {least}, not {number}")
        folder = Path(path)
        manifest = read_manifest(folder)
        limited = limit_context(manifest, max_seq_len)
        with _name_folder(folder):
            for place, own_manifest in find_own_folders(folder, manifest):
                check_files(place, own_manifest, verify_hashes=verify_hashes)
            template = None if chat_template is None else Path(chat_template)
            tokenizer = load_tokenizer(folder, manifest, template)
            programs = load_programs(folder, manifest, threads=threads, **options)
            warm_up(programs, manifest, warm)
            times = None
            if manifest.build.adaptive:
                times = open_step_times(programs, manifest, threads, LOAD_SECONDS)
            with contextlib.suppress(OSError):  # an engine that others own
                os.utime(folder)  # the time of its last use, for `mtpbuild list`
            if manifest.build.exact_note:
                log.warning("note: %s: %s", folder, manifest.build.exact_note)
            log.info("loaded %s: %s, nextn %s", folder, manifest.target.name, manifest.build.drafts)
            limit = prefix_cache_bytes if prefix_cache else 0
            rows_folder = prefix_cache_dir if prefix_cache else None
            return cls(
                programs,
                limited,
                tokenizer,
                folder=folder,
                overlap=overlap,
                prefix_cache=open_prefix_cache(programs, limited, folder, limit, rows_folder),
                step_times=times,
                chunked_prefill_size=chunked_prefill_size,
            )

    @property
    def folder(self) -> Path | None:
        """The directory that it was loaded from."""
        return self._loaded.folder

    @property
    def manifest(self) -> Manifest:
        """What the engine is, from its `engine.json`."""
        return self._loaded.manifest

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What turns texts into tokens; None for an engine that was built without one."""
        return self._loaded.tokenizer

    @property
    def stats(self) -> EngineStats:
        """The totals of all requests so far."""
        return self._loaded.stats

    @property
    def failure(self) -> str | None:
        """The reason why the engine cannot continue; None as long as none is known.

        A rank has ended, the thread that steps for asyncio has ended, or the process was forked.
        """
        return self._loaded.failure

    @property
    def alive(self) -> bool:
        """Whether requests can be answered: it was not closed, and no `failure` is known."""
        return not self._loaded.driver.closed and self.failure is None

    def __repr__(self) -> str:
        model, build, target = self.manifest.model.name, self.manifest.build, self.manifest.target
        place = "" if self.folder is None else f" from {str(self.folder)!r}"
        closed = ", closed" if self._loaded.driver.closed else ""
        return f"<Engine of {model}{place}: nextn {build.drafts}, {target.name}{closed}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """End all requests, whose waiters get an EngineError; drop programs and weights."""
        self._loaded.driver.close()

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
        new = type(self).load(path, **options)._loaded
        with self.totals.lock:
            old = self._loaded
            if old.driver.closed:
                new.driver.close()
                raise EngineError("the engine is closed")
            self.totals.replaced.append(old)
            self._loaded = new
        try:
            old.driver.finish()
        finally:
            self.totals.retire(old)

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
            loaded = self._loaded
            with loaded.driver.hold():
                if loaded is self._loaded:  # else a swap came first, and does not wait
                    pinned = type(self).__new__(type(self))
                    pinned._loaded, pinned.totals = loaded, self.totals
                    yield pinned
                    return

    @overload  # a text is one prompt, although its type is also a sequence of texts
    def generate(  # type: ignore[overload-overlap]
        self, prompt: Prompt, params: Params = None, *, observer: Observer | None = None
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: Params | Sequence[SamplingParams] = None,
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
                streams = [stack.enter_context(Stream(request)) for request in requests]
            return [stream.result() for stream in streams]

    @overload
    def chat(
        self,
        messages: Chat,
        params: Params = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack["ChatArguments"],
    ) -> ChatResult: ...
    @overload
    def chat(
        self,
        messages: Chat,
        params: Params = None,
        *,
        stream: Literal[True],
        **options: Unpack["ChatArguments"],
    ) -> ChatStream: ...

    def chat(
        self, messages: Chat, params: Params = None, *, stream: bool = False, **options: Any
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
            answer = ChatStream(*engine.prepare_chat(messages, params, **options))
        if stream:
            return answer
        with answer:
            return answer.result()

    @overload
    async def achat(
        self,
        messages: Chat,
        params: Params = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack["ChatArguments"],
    ) -> ChatResult: ...
    @overload
    async def achat(
        self,
        messages: Chat,
        params: Params = None,
        *,
        stream: Literal[True],
        **options: Unpack["ChatArguments"],
    ) -> AsyncChatStream: ...

    async def achat(
        self, messages: Chat, params: Params = None, *, stream: bool = False, **options: Any
    ) -> ChatResult | AsyncChatStream:
        """Answer a conversation in asyncio, with the options of `chat`.

        A cancelled task ends the request.

            answer = await engine.achat(messages)
            async for chunk in await engine.achat(messages, stream=True):
                print(chunk.content, end="")
        """
        import asyncio  # here, because it is slow to import and few programs use it

        with self.pinned() as engine:
            prepared = await asyncio.to_thread(engine.prepare_chat, messages, params, **options)
            answer = AsyncChatStream(*prepared)
        return answer if stream else await answer.result()

    def stream(
        self, prompt: Prompt, params: Params = None, *, observer: Observer | None = None
    ) -> Stream:
        """Queue a prompt; iterate over the returned Stream for its chunks.

        observer: sees each step of the request, such as a `Trace`.
        """
        with self.pinned() as engine:
            return Stream(engine.prepare(prompt, params, observer=observer))

    async def astream(
        self,
        prompt: Prompt | Request,
        params: Params = None,
        *,
        observer: Observer | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Stream a prompt in asyncio; a cancelled task or closed generator ends the request.

        prompt: a prompt, or the request that `prepare` made from a prompt.
        """
        if isinstance(prompt, Request):
            chunks = AsyncStream(prompt)
        else:
            with self.pinned() as engine:
                chunks = AsyncStream(engine.prepare(prompt, params, observer=observer))
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
        with self.totals.lock:
            stats = self.stats
            counts = self.totals.count_all(stats)
            return MeteredModel(name, self.manifest.build, stats, counts, self.totals)

    def retire(self) -> None:
        """Leave the counts in `totals` to the engine that takes this one's place."""
        self.totals.retire(self._loaded)

    def answer_params(
        self,
        params: SamplingParams,
        tool_use: "ToolUse | None" = None,
        *,
        split_thought: bool = True,
    ) -> SamplingParams:
        """Return the settings of a chat's answer, whose thought and calls can be told apart."""
        thinks = self.manifest.model.thinking_token_ids is not None
        splits = split_thought and thinks
        names = (*(THOUGHT_TOKENS if thinks else ()), *(tool_use.form.tokens if tool_use else ()))
        if not names:
            return params
        shown = {*params.shown_tokens, *(id for n, id in self.special_ids.items() if n in names)}
        return replace(params, shown_tokens=sorted(shown), split_thought=splits)

    def prepare(
        self, prompt: Prompt, params: Params = None, *, observer: Observer | None = None
    ) -> Request:
        """Check a prompt and its settings in any thread, for one call of `astream`.

        It waits for no step; its time depends on the lengths of prompt and grammar.
        """
        ids, params = self.token_ids(prompt), _choose_params(params)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop: this engine was built without a tokenizer", "stop")
        request = Request(ids, params, self.manifest, self.tokenizer, observer)
        request.grammar = self._loaded.grammars.make_grammar(params, request.controls)
        request.owner, request.totals = self._loaded.driver, self.totals
        return request

    def prepare_chat(
        self,
        messages: Chat,
        params: Params = None,
        *,
        observer: Observer | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        tool_call_parser: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> tuple[Request, AnswerParser]:
        """Check a conversation and its settings; return the request and its answer's parser."""
        from mtpbuild.runtime.tool_calls.tool_use import read_tool_use

        params = _choose_params(params)
        tool_use = read_tool_use(
            self.tokenizer,
            tools=options.get("tools"),
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            tool_call_parser=tool_call_parser,
        )
        if tool_choice == "none" or not options.get("tools"):
            options.pop("tools", None)
        prompt: Prompt = messages  # type: ignore[assignment]
        first = messages[0] if isinstance(messages, Sequence) and messages else None
        if not isinstance(messages, str) and not isinstance(first, Integral):
            prompt = self.chat_ids(cast(Sequence[Message], messages), **options)
        if tool_use is not None and tool_use.forced is not None:
            if params.structured_outputs is not None:
                wrong = "structured_outputs can't go with a forced tool call"
                raise RequestError(wrong, "structured_outputs")
            params = replace(params, structured_outputs=tool_use.forced)
        request = self.prepare(prompt, self.answer_params(params, tool_use), observer=observer)
        return request, AnswerParser(calls=tool_use.make_parser() if tool_use else None)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's token ids; raise RequestError if the engine has no tokenizer."""
        return self._require_tokenizer().encode(text, add_special_tokens=add_special_tokens)

    @property
    def special_ids(self) -> dict[str, int]:
        """The special tokens that the model can emit, by name."""
        named = self.tokenizer.special_ids if self.tokenizer else {}
        return {name: id for name, id in named.items() if id < self.manifest.model.vocab_size}

    def token_ids(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Return a prompt's ids; raise RequestError if they exceed vocabulary or capacity.

        add_special_tokens: whether to add the tokenizer's own, such as the BOS, to a text.
        """
        vocabulary, capacity = self.manifest.model.vocab_size, self.manifest.build.max_seq_len
        if not isinstance(prompt, str):
            ids = _check_ids(prompt)
        elif prompt and self._require_tokenizer().exceeds(prompt, capacity):
            raise ContextLengthError(None, capacity)
        else:
            ids = self.encode(prompt, add_special_tokens=add_special_tokens) if prompt else []
        if not ids:
            raise RequestError("the prompt is empty")
        for id in (min(ids), max(ids)):
            if not 0 <= id < vocabulary:
                wrong = f"token id {format_value(id)} is outside the vocabulary"
                raise RequestError(f"{wrong} 0..{vocabulary - 1}")
        if len(ids) >= capacity:
            raise ContextLengthError(len(ids), capacity)
        return ids

    def chat_prompt(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        """Return the prompt for the next answer in a conversation, by the model's template.

        options: tools, documents, add_generation_prompt, continue_final_message and
        chat_template_kwargs, as in `apply_chat_template` of transformers. The prompt contains its
        special tokens; `generate` and `stream` do not add a second BOS.
        """
        tokenizer = self._require_tokenizer()
        return render_messages(
            messages, lambda rendered: tokenizer.chat_prompt(rendered, **options)
        )

    def chat_ids(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> list[int]:
        """Return `chat_prompt` as checked token ids; the tokenizer adds no special tokens."""
        return self.token_ids(self.chat_prompt(messages, **options), add_special_tokens=False)

    def check(self, params: SamplingParams, *, form: bool = True) -> None:
        """Raise RequestError for settings that this engine does not support, whatever the prompt.

        Raises MissingDependencyError for a grammar if llguidance is not installed. form: whether to
        compile the grammar, which may take a second.
        """
        controls = make_step_controls([0], params, self.manifest)
        if form:
            self._loaded.grammars.make_grammar(params, controls)

    def reset_prefix_cache(self) -> None:
        """Forget the rows of earlier prompts; prefixes that were added to the engine stay."""
        self._loaded.driver.call_between_steps(self._loaded.loop.forget)

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this engine was built without a tokenizer: give token ids")
        return self.tokenizer


@contextlib.contextmanager
def _name_folder(folder: Path) -> Iterator[None]:
    """Let errors of the block, which loads an engine, name its folder and say what to do."""
    try:
        yield
    except OSError as error:
        raise EngineFileError(f"{folder}: can't be read ({error})") from None
    except MtpbuildError:
        raise
    except Exception as error:  # e.g. a valid manifest that does not fit its programs
        reason = f"{type(error).__name__}: {take_first_line(error)}"
        raise EngineError(f"{folder}: can't be loaded ({reason}); rebuild it") from error


def _choose_params(params: SamplingParams | None) -> SamplingParams:
    """Return the settings, or the defaults for None; raise RequestError for another type."""
    if not isinstance(params, SamplingParams | None):
        raise RequestError(f"settings are given as SamplingParams, not {format_value(params)}")
    return SamplingParams() if params is None else params


def _check_ids(prompt: Sequence[int]) -> list[int]:
    with contextlib.suppress(TypeError):
        ids = list(prompt)
        if not isinstance(prompt, bytes | Mapping | Set) and bool not in set(map(type, ids)):
            return list(map(operator.index, ids))
    raise RequestError(f"a prompt is a text or a list of token ids, not {format_value(prompt)}")
