"""transformers as a side: side_transformers.py DIRECTORY DTYPE. Requests run in padded batches of
8, sorted by length."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from serving import serve
from transformers import AutoModelForCausalLM

BATCH_SIZE = 8


class TokenTimes:
    """A streamer that only records times."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is buffered, so there is nothing to do."""


def main() -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=sys.argv[2]).eval()
    fixed = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    @torch.inference_mode()
    def generate(prompts: list[list[int]], max_tokens: list[int]) -> None:
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        for start in range(0, len(order), BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            width = max(len(prompts[row]) for row in rows)
            ids = torch.tensor([[0] * (width - len(prompts[row])) + prompts[row] for row in rows])
            mask = torch.tensor(
                [[0] * (width - len(prompts[row])) + [1] * len(prompts[row]) for row in rows]
            )
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max(max_tokens[row] for row in rows),
                **fixed,
            )

    @torch.inference_mode()
    def stream(prompt: list[int], max_tokens: int) -> list[float]:
        streamer = TokenTimes()
        ids = torch.tensor([prompt])
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            streamer=streamer,
            **fixed,
        )
        return streamer.times[1:]  # the first call contains the prompt

    serve(generate, stream)


if __name__ == "__main__":
    main()
