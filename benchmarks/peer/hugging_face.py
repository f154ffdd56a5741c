"""Runs transformers in fp32: python hugging_face.py CHECKPOINT THREADS eager|mtp."""

import sys
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Any

from worker import Generate, serve


class Tokens:
    """A streamer for `generate` that passes on tokens; `generate` sends the prompt first."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[list[int] | None] = SimpleQueue()
        self.seen = False

    def put(self, value: Any) -> None:
        if self.seen:
            self.queue.put(value.flatten().tolist())
        self.seen = True

    def end(self) -> None:
        self.queue.put(None)


def load() -> Generate:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    folder, threads, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options: dict[str, Any] = {}
    if mode == "mtp":
        options["use_mtp"] = True
        # transformers looks for modules only from layer 61 on, as in the published checkpoints.
        first, count = model.config.num_hidden_layers, model.config.num_mtp_layers
        layers = "|".join(str(first + k) for k in range(count))
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.(?:{layers})\."]

    def generate(prompt: list[int], count: int) -> Iterator[list[int]]:
        tokens, failures = Tokens(), list[BaseException]()

        def run() -> None:
            torch.set_num_threads(threads)  # each Python thread has its own setting
            try:
                with torch.no_grad():
                    model.generate(
                        torch.tensor([prompt]),
                        max_new_tokens=count,
                        do_sample=False,
                        eos_token_id=None,
                        pad_token_id=1,
                        streamer=tokens,
                        **options,
                    )
            except BaseException as failure:
                failures.append(failure)
                tokens.end()

        thread = Thread(target=run)
        thread.start()
        while (new := tokens.queue.get()) is not None:
            yield new
        thread.join()
        if failures:
            raise failures[0]

    return generate


serve(load)
