"""llama.cpp's lookup decoding as a side of drafts.py: side_lookup.py MODEL.gguf. Runs under a
Python with llama-cpp-python.

It uses the package's `Llama` class, which has the lookup. The tokens are sampled by llama.cpp.
"""

from __future__ import annotations

import os
import sys
import time
from itertools import islice
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from serving import serve

CONTEXT_TOKENS = 1024


def load(path: str, lookup: LlamaPromptLookupDecoding | None) -> llama_cpp.Llama:
    """Load the model for one request at a time on all cores."""
    cores = len(os.sched_getaffinity(0))
    return llama_cpp.Llama(
        path,
        n_ctx=CONTEXT_TOKENS,
        n_threads=cores,
        n_threads_batch=cores,
        flash_attn=True,
        draft_model=lookup,
        verbose=False,
    )


def complete(llm: llama_cpp.Llama, prompt: list[int], num_tokens: int) -> tuple[list[int], float]:
    """Return that many tokens, greedily, and the seconds since the first of them. The context keeps
    the keys of the prompt for the next call."""
    tokens = llm.generate(prompt, temp=0.0)
    token_ids = [next(tokens)]
    begin = time.perf_counter()
    token_ids += islice(tokens, num_tokens - 1)
    return token_ids, time.perf_counter() - begin


def main() -> None:
    lookup = LlamaPromptLookupDecoding()
    plain = load(sys.argv[1], None)
    drafting = load(sys.argv[1], lookup)

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        """Complete a prompt with each of these numbers of draft tokens a step. 0: no lookup."""
        lookup.max_ngram_size = job["max_ngram_size"]
        for llm in (plain, drafting):
            llm.reset()
            complete(llm, job["prompt"], 1)
        done = []
        for length in job["lengths"]:
            lookup.num_pred_tokens = length
            llm = drafting if length else plain
            done.append(complete(llm, job["prompt"], job["max_tokens"]))
        token_ids, seconds = zip(*done, strict=True)
        return {"token_ids": token_ids, "seconds": seconds}

    def stream(prompt: list[int], num_tokens: int) -> list[float]:
        complete(plain, prompt, num_tokens)
        return []

    serve(lambda prompts, max_tokens: None, stream, {"answer": answer})


if __name__ == "__main__":
    main()
