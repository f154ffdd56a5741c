"""llama.cpp through its C interface: a model, and contexts for several sequences."""

import ctypes
import struct
import sys
from collections.abc import Sequence
from typing import Any

CHUNK = 512  # prompt tokens per call: llama.cpp's own default of n_ubatch
ROW_STEP = 256  # a sequence's rows are a multiple of this


class Model:
    """A memory-mapped GGUF file, and the tensors that llama.cpp repacks from it, if it may."""

    def __init__(self, path: str, *, repack: bool = True) -> None:
        import llama_cpp

        self.lib = llama_cpp

        @llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
        def quiet(level: int, text: bytes, data: Any) -> None:
            if level >= 4:  # GGML_LOG_LEVEL_ERROR
                sys.stderr.write(text.decode(errors="replace"))

        self.quiet = quiet
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = repack
        self.handle = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self.handle:
            raise RuntimeError(f"{path}: llama.cpp can't load it")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self.handle)
        )


class Context:
    """Caches of `sequences` sequences, each with `rows` rows, and a batch to decode.

    drafts: the most tokens that are decoded and then dropped; a recurrent state keeps a copy for
    each. caches: "f16" with llama.cpp's own choice of attention, or "q8_0" with flash attention,
    which quantised values need.
    """

    def __init__(
        self,
        model: Model,
        threads: int,
        rows: int,
        sequences: int = 1,
        drafts: int = 0,
        caches: str = "f16",
    ) -> None:
        import numpy as np

        self.lib, self.np, self.vocabulary = model.lib, np, model.vocabulary
        params = self.lib.llama_context_default_params()
        self.rows = -(-rows // ROW_STEP) * ROW_STEP
        params.n_ctx = self.rows * sequences
        params.n_batch = params.n_ubatch = CHUNK
        params.n_seq_max = sequences
        params.n_rs_seq = drafts
        params.swa_full = False  # layers with a window keep its rows alone, as in llama-server
        params.n_threads = params.n_threads_batch = threads
        if caches == "q8_0":
            params.type_k = params.type_v = self.lib.GGML_TYPE_Q8_0
            params.flash_attn_type = self.lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.handle = self.lib.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise RuntimeError(f"llama.cpp can't make a context of {sequences} x {rows} tokens")
        self.batch = self.lib.llama_batch_init(CHUNK, 0, 1)
        self.memory = self.lib.llama_get_memory(self.handle)

    def decode(self, tokens: Sequence[int], start: int) -> None:
        """Decode tokens of the first sequence from position `start` on; keep the last's logits."""
        last = len(tokens) - 1
        self.run([(t, start + i, 0, i == last) for i, t in enumerate(tokens)])

    def run(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Run one pass over rows of (token, position, sequence, whether its logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        failed = self.lib.llama_decode(self.handle, batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")

    def best(self, place: int) -> int:
        """Return the most probable token after a row of the batch whose logits were computed."""
        logits = self.lib.llama_get_logits_ith(self.handle, place)
        values = self.np.ctypeslib.as_array(logits, shape=(self.vocabulary,))
        return int(values.argmax())

    def prompt(self, tokens: Sequence[int]) -> int:
        """Replace the first sequence by this prompt; return the token after it."""
        self.keep(0)
        for start in range(0, len(tokens), CHUNK):
            self.decode(tokens[start : start + CHUNK], start)
        return self.best(-1)

    def keep(self, rows: int, sequence: int = 0) -> None:
        """Drop all except the first `rows` rows of a sequence."""
        if not self.lib.llama_memory_seq_rm(self.memory, sequence, rows, -1):
            raise RuntimeError(f"llama.cpp can't go back to token {rows}")

    def fill(self, sequence: int, count: int) -> None:
        """Give a sequence `count` rows without a prompt, by repeating the first sequence's rows.

        The first sequence must hold some rows. Its state is saved, extended by repeated rows, and
        loaded as the other sequence.
        """
        size = self.lib.llama_state_seq_get_size(self.handle, 0)
        saved = (ctypes.c_uint8 * size)()
        if self.lib.llama_state_seq_get_data(self.handle, saved, size, 0) != size:
            raise RuntimeError("llama.cpp can't save a sequence")
        longer = lengthened(bytes(saved), count, self.np)
        state = (ctypes.c_uint8 * len(longer)).from_buffer(longer)
        read = self.lib.llama_state_seq_set_data(self.handle, state, len(longer), sequence)
        last = self.lib.llama_memory_seq_pos_max(self.memory, sequence)
        if (read, last) != (len(longer), count - 1):
            raise RuntimeError(f"llama.cpp can't be given {count} rows: it took {last + 1}")

    def close(self) -> None:
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.handle)


def lengthened(state: bytes, count: int, np: Any) -> bytearray:
    """Return a saved sequence with `count` rows, which repeat its saved ones.

    The format is llama.cpp 0.3.36's: magic, sequence, the number of streams and of cells in each;
    position, 1 and sequence of each cell; whether values are transposed, the number of layers; for
    each layer the keys' type, bytes per row and rows, then the same for the values, if any.
    """
    magic, sequence, streams = struct.unpack_from("<IiI", state)
    (cells,) = struct.unpack_from("<I", state, 12)
    at = 16 + 12 * cells  # cells of the first stream; sequence 0 has none in the others
    transposed, layers = struct.unpack_from("<II", state, at)
    if transposed:
        raise RuntimeError("llama.cpp keeps values transposed here: rows can't be repeated")
    at += 8
    out = bytearray(struct.pack("<IiII", magic, sequence, streams, count))
    meta = np.zeros((count, 3), "<i4")
    meta[:, 0], meta[:, 1] = np.arange(count), 1
    out += meta.tobytes() + struct.pack("<II", transposed, layers)
    end = len(state) - 4 * (streams - 1)
    while at < end:
        _, size = struct.unpack_from("<iQ", state, at)
        rows = np.frombuffer(state, np.uint8, cells * size, at + 12).reshape(cells, size)
        out += state[at : at + 12] + np.resize(rows, (count, size)).tobytes()
        at += 12 + cells * size
    return out + bytes(4 * (streams - 1))
