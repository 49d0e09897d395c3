"""llama.cpp as a side: side_llama.py MODEL.gguf. Runs under a Python with llama-cpp-python.

It uses llama.cpp's own batch functions. With the package's `Llama` class, its sampling in Python
would be measured instead. Sequences decode together and prompts fill the rest of each batch, as in
llama-server.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
from serving import serve

BATCH_TOKENS = 512
MAX_SEQUENCES = 32


class Context:
    """A llama.cpp context for `num_sequences` requests at once, each with up to `length` tokens."""

    def __init__(self, model: Any, num_sequences: int, length: int) -> None:
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = num_sequences * length
        settings.n_seq_max = num_sequences
        settings.n_batch = settings.n_ubatch = BATCH_TOKENS
        settings.n_threads = settings.n_threads_batch = len(os.sched_getaffinity(0))
        self.handle = llama_cpp.llama_init_from_model(model, settings)
        if not self.handle:
            raise RuntimeError("llama.cpp made no context")
        self.num_sequences = num_sequences
        self.length = length
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def run(
        self,
        prompts: list[list[int]],
        max_tokens: list[int],
        on_token: Callable[[], None] = lambda: None,
    ) -> None:
        """Complete all prompts greedily. The KV cache of earlier calls is dropped."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.handle), True)
        waiting = list(range(len(prompts)))[::-1]
        free = list(range(self.num_sequences))
        running = dict[int, Request]()
        while waiting or running:
            while waiting and free:
                index = waiting.pop()
                running[free[-1]] = Request(prompts[index], max_tokens[index])
                free.pop()
            for sequence in self._step(running):
                on_token()
                if not running[sequence].left:
                    llama_cpp.llama_memory_seq_rm(
                        llama_cpp.llama_get_memory(self.handle), sequence, -1, -1
                    )
                    del running[sequence]
                    free.append(sequence)

    def _step(self, running: dict[int, Request]) -> list[int]:
        """Compute one batch. Returns the sequences that got a token."""
        batch = self.batch
        count = 0
        samples = []
        for sequence, request in sorted(running.items(), key=lambda entry: len(entry[1].tokens)):
            taken = request.tokens[: BATCH_TOKENS - count]
            del request.tokens[: len(taken)]
            for token in taken:
                batch.token[count] = token
                batch.pos[count] = request.position
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = sequence
                batch.logits[count] = False
                request.position += 1
                count += 1
            if taken and not request.tokens:
                batch.logits[count - 1] = True
                samples.append((sequence, count - 1))
        batch.n_tokens = count
        if llama_cpp.llama_decode(self.handle, batch):
            raise RuntimeError("llama_decode failed")
        for sequence, place in samples:
            logits = np.ctypeslib.as_array(
                llama_cpp.llama_get_logits_ith(self.handle, place), (self.vocab_size,)
            )
            running[sequence].tokens.append(int(logits.argmax()))
            running[sequence].left -= 1
        return [sequence for sequence, _ in samples]


class Request:
    """One sequence. tokens: those that are not yet computed. position: the position of the first of
    them. left: the number of tokens still to be sampled."""

    def __init__(self, prompt: list[int], max_tokens: int) -> None:
        self.tokens = list(prompt)
        self.position = 0
        self.left = max_tokens


def main() -> None:
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        sys.argv[1].encode(), llama_cpp.llama_model_default_params()
    )
    one = Context(model, 1, 2048)
    contexts = [one]

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> None:
        length = max(len(prompt) + count for prompt, count in zip(prompts, max_tokens, strict=True))
        if contexts[-1] is one or contexts[-1].length < length:
            contexts.append(Context(model, MAX_SEQUENCES, -(-length // 256) * 256))
        contexts[-1].run(prompts, max_tokens)

    def stream(prompt: list[int], max_tokens: int) -> list[float]:
        times: list[float] = []
        one.run([prompt], [max_tokens], lambda: times.append(time.perf_counter()))
        return times

    serve(generate, stream)


if __name__ == "__main__":
    main()
