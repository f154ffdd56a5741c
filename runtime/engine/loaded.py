"""A loaded engine directory: its checks of prompts and settings, its requests and its state."""

import contextlib
import logging
import operator
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, Unpack, cast

import numpy as np

from mtpbuild.runtime.checks import format_value
from mtpbuild.runtime.constraints.grammar import Grammars
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import Manifest, check_files, read_manifest
from mtpbuild.runtime.contract.programs import Adaptive, Programs, Shared
from mtpbuild.runtime.engine.driver import Driver
from mtpbuild.runtime.engine.loop import Loop
from mtpbuild.runtime.engine.step_times import LOAD_SECONDS, StepTimes, open_step_times
from mtpbuild.runtime.errors import (
    ContextLengthError,
    EngineError,
    EngineFileError,
    MtpbuildError,
    RequestError,
    UsageError,
    take_first_line,
)
from mtpbuild.runtime.group.start import find_own_folders
from mtpbuild.runtime.prefix_cache.cache import PrefixCache, open_prefix_cache
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.requests.answer import AnswerParser
from mtpbuild.runtime.requests.request import Observer, Request
from mtpbuild.runtime.requests.stats import EngineStats
from mtpbuild.runtime.requests.step_controls import make_step_controls
from mtpbuild.runtime.requests.totals import RequestTotals
from mtpbuild.runtime.sampling.params import SamplingParams
from mtpbuild.runtime.text.chat_template import ChatOptions, Message
from mtpbuild.runtime.text.messages import render_messages
from mtpbuild.runtime.text.reasoning import BEGIN, END
from mtpbuild.runtime.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from mtpbuild.runtime.tool_calls import ToolUse  # few requests have tools, and all load sooner

Prompt: TypeAlias = str | Sequence[int]  # text, or token ids that are used unchanged
Chat: TypeAlias = Sequence[Message] | Prompt  # a conversation, or its prompt

WARM_UP = 8  # tokens of the prompt that is filled in before the first request
log = logging.getLogger("mtpbuild")


class LoadedEngine:
    """A loaded engine directory, which prepares requests."""

    def __init__(
        self,
        programs: Programs,
        manifest: Manifest,
        tokenizer: Tokenizer | None = None,
        *,
        overlap: bool = True,
        prefix_cache: PrefixCache | None = None,
        step_times: StepTimes | None = None,
        chunked_prefill_size: int | None = None,
    ) -> None:
        self.folder: Path | None = None  # that it was loaded from
        self.manifest = manifest
        self.tokenizer = tokenizer
        self._grammars = Grammars(manifest, tokenizer, programs.features)
        self._loop = Loop(
            programs,
            manifest,
            overlap=overlap,
            prefix_cache=prefix_cache,
            step_times=step_times,
            chunked_prefill_size=chunked_prefill_size,
        )
        self._driver = Driver(self._loop)
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
        if threads is not None and threads < 1:
            raise UsageError(f"threads must be a number from 1, not {threads}")
        if prefix_cache_bytes is not None and prefix_cache_bytes < 0:
            raise UsageError(f"prefix_cache_bytes must be from 0, not {prefix_cache_bytes}")
        if chunked_prefill_size is not None and chunked_prefill_size < 1:
            raise UsageError(f"chunked_prefill_size must be from 1, not {chunked_prefill_size}")
        folder = Path(path)
        manifest = read_manifest(folder)
        limited = limit_context(manifest, max_seq_len)
        try:
            for place, own in find_own_folders(folder, manifest):
                check_files(place, own, verify_hashes=verify_hashes)
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
            cache = open_prefix_cache(programs, limited, folder, limit, rows_folder)
            engine = cls(
                programs,
                limited,
                tokenizer,
                overlap=overlap,
                prefix_cache=cache,
                step_times=times,
                chunked_prefill_size=chunked_prefill_size,
            )
            engine.folder = folder
            return engine
        except OSError as error:
            raise EngineFileError(f"{folder}: can't be read ({error})") from None
        except MtpbuildError:
            raise
        except Exception as error:  # e.g. a valid manifest that does not fit its programs
            reason = f"{type(error).__name__}: {take_first_line(error)}"
            raise EngineError(f"{folder}: can't be loaded ({reason}); rebuild it") from error

    def answer_params(
        self,
        params: SamplingParams,
        tool_use: "ToolUse | None" = None,
        *,
        split_thought: bool = True,
    ) -> SamplingParams:
        """Return the settings of a chat's answer, whose thought and calls can be told apart."""
        splits = split_thought and self.manifest.model.thinking_token_ids is not None
        names = (*((BEGIN, END) if splits else ()), *(tool_use.form.tokens if tool_use else ()))
        if not splits and not names:
            return params
        shown = {*params.shown_tokens, *(id for n, id in self.special_ids.items() if n in names)}
        return replace(params, shown_tokens=sorted(shown), split_thought=splits)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        observer: Observer | None = None,
    ) -> Request:
        """Check a prompt and its settings in any thread, for one call of `astream`.

        It waits for no step; its time depends on the lengths of prompt and grammar.
        """
        ids, params = self.token_ids(prompt), _choose_params(params)
        if params.stop and self.tokenizer is None:
            raise RequestError("this engine was built without a tokenizer: it has no stop strings")
        request = Request(ids, params, self.manifest, self.tokenizer, observer)
        request.grammar = self._grammars.make_grammar(params, request.controls)
        request.owner, request.totals = self._driver, self.totals
        return request

    def prepare_chat(
        self,
        messages: Chat,
        params: SamplingParams | None,
        observer: Observer | None,
        *,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        tool_call_parser: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> tuple[Request, AnswerParser]:
        """Check a conversation and its settings; return the request and its answer's parser."""
        from mtpbuild.runtime.tool_calls import read_tool_use

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
                raise RequestError("structured_outputs can't go with a forced tool call")
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
        return render_messages(messages, lambda each: tokenizer.chat_prompt(each, **options))

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
            self._grammars.make_grammar(params, controls)

    @property
    def stats(self) -> EngineStats:
        """Totals of all requests so far."""
        admitted, build = self._loop.scheduler.admitted, self.manifest.build
        running = sum(not request.cancelled for request in admitted)
        rows = build.slots * build.max_seq_len
        acceptance, prefixes = self._loop.acceptance, self._loop.prefix_cache
        return EngineStats(
            requests_running=running,
            requests_waiting=len(self._loop.scheduler.waiting),
            requests_ended=self._loop.requests - running,
            prompt_tokens=self._loop.prompt_tokens,
            output_tokens=acceptance.tokens,
            speculative_decoding=acceptance.report(),
            prefix_queries=prefixes.queries if prefixes else 0,
            prefix_hits=prefixes.hits if prefixes else 0,
            prefix_bytes=prefixes.tree.used if prefixes else 0,
            prefix_limit=prefixes.tree.limit if prefixes else 0,
            num_drafts=acceptance.drafts,
            cache_usage=sum(request.length for request in admitted) / rows,
            step_tokens=dict(self._loop.step_tokens),
        )

    @property
    def failure(self) -> str | None:
        """The reason why the engine cannot continue; None as long as none is known.

        A rank has ended, the thread that steps for asyncio has ended, or the process was forked.
        """
        if (reason := self._driver.failure) or self._driver.closed:
            return reason
        programs = self._loop.programs
        return cast(Shared, programs).failure if Feature.SHARE in programs.features else None

    @property
    def alive(self) -> bool:
        """Whether requests can be answered: it was not closed, and no `failure` is known."""
        return not self._driver.closed and self.failure is None

    def reset_prefix_cache(self) -> None:
        """Forget the rows of earlier prompts; the next prompts are filled in completely."""
        self._driver.call_between_steps(self._loop.forget)

    def close(self) -> None:
        """End all requests, whose waiters get an EngineError; drop programs and weights."""
        self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this engine was built without a tokenizer: give token ids")
        return self.tokenizer


def warm_up(programs: Programs, manifest: Manifest, settings: Iterable[SamplingParams]) -> None:
    """Fill in a short prompt and run a step, once for each of these settings.

    An adaptive engine runs a step with each nextn, which is a program of its own; its step with one
    draft first fills in what the step without drafts left out. The slot stays free.
    """
    build = manifest.build
    length = min(WARM_UP, build.prefill_chunk, build.max_seq_len - 1)
    active = np.arange(build.slots) == 0
    for params in settings:
        programs.prefill(0, 0, np.zeros(length + programs.lookahead, np.int64))
        for nextn in range(build.nextn + 1) if build.adaptive else (None,):
            if nextn is not None:
                cast(Adaptive, programs).draft(nextn)
            if nextn != 1:
                programs.begin(0, length, 0, make_step_controls([0], params, manifest))
            programs.step(active, length + 1 + manifest.window)


def limit_context(manifest: Manifest, max_seq_len: int | None) -> Manifest:
    """Return the manifest with another limit of a request's tokens, if one is given."""
    least, most = manifest.window + 3, manifest.build.max_seq_len
    if max_seq_len is None:
        return manifest
    if not least <= max_seq_len <= most:
        raise UsageError(
            f"max_seq_len must be from {least} to {most}, for which this engine was built, not "
            f"{format_value(max_seq_len)}"
        )
    build = manifest.build.model_copy(update={"max_seq_len": max_seq_len})
    return manifest.model_copy(update={"build": build})


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
