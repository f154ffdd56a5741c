"""llama.cpp by its C interface: python llama_cpp_peer.py MODEL.gguf THREADS CONTEXT"""

import ctypes
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from worker import Extras, Generate, serve

CHUNK = 512  # prompt tokens per call: llama.cpp's own default of n_ubatch
DEEP, ROUNDS = 200, 100  # tokens in the cache, and repetitions, of the comparison of batches


class Model:
    def __init__(self, path: str, threads: int, context: int) -> None:
        import llama_cpp
        import numpy as np

        self.lib, self.np = llama_cpp, np

        @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
        def quiet(level: int, text: bytes, data: Any) -> None:
            if level >= 4:  # GGML_LOG_LEVEL_ERROR
                sys.stderr.write(text.decode(errors="replace"))

        self.quiet = quiet
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"{path}: llama.cpp can't load it")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, CHUNK, CHUNK
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"{path}: llama.cpp can't make a context of {context} tokens")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self.model)
        )
        self.batch = llama_cpp.llama_batch_init(CHUNK, 0, 1)
        self.memory = llama_cpp.llama_get_memory(self.context)

    def decode(self, tokens: Sequence[int], start: int, every: bool = False) -> None:
        """every: logits of all tokens, else of the last."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, start + i, 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = every or i == len(tokens) - 1
        failed = self.lib.llama_decode(self.context, batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")

    def best(self, place: int) -> int:
        logits = self.lib.llama_get_logits_ith(self.context, place)
        values = self.np.ctypeslib.as_array(logits, shape=(self.vocabulary,))
        return int(values.argmax())

    def generate(self, prompt: list[int], count: int) -> Iterator[list[int]]:
        self.lib.llama_memory_clear(self.memory, True)
        for start in range(0, len(prompt), CHUNK):
            self.decode(prompt[start : start + CHUNK], start)
        length = len(prompt)
        newest = self.best(-1)
        yield [newest]
        for _ in range(count - 1):
            self.decode([newest], length)
            length += 1
            newest = self.best(-1)
            yield [newest]

    def verify(self) -> dict[str, Any]:
        """Milliseconds of a step of 1 token and of 4, in turn, behind the same prompt."""
        times: dict[int, list[float]] = {1: [], 4: []}
        self.lib.llama_memory_clear(self.memory, True)
        self.decode([20 + i % 100 for i in range(DEEP)], 0)
        for _ in range(ROUNDS):
            for size, found in times.items():
                self.lib.llama_memory_seq_rm(self.memory, 0, DEEP, -1)
                start = time.perf_counter()
                self.decode(range(30, 30 + size), DEEP, every=True)
                for place in range(size):
                    self.best(place)
                found.append(1e3 * (time.perf_counter() - start))
        one, four = (statistics.median(found) for found in times.values())
        return {"step_ms": one, "verify_ms": four, "v": four / one}


loaded: list[Model] = []


def load() -> Generate:
    loaded.append(Model(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    return loaded[0].generate


def extras() -> Extras:
    return {"verify": loaded[0].verify}


serve(load, extras)
