"""Parity with transformers on the fake GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from fake_gpu_engine import engine_on_fake_gpu
from tiny_models import Reference, check_answers

from pegboard import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)


def check_two(reference: Reference, llm: LLM) -> None:
    """The answers to two prompts are those of the reference."""
    check_answers(reference, llm, (6, 17))


def check_on_gpu(
    reference: Reference,
    kernels: Collection[str] = (),
    *,
    by_triton: bool = False,
    check: Callable[[Reference, LLM], None] = check_two,
    replays: bool = True,
    **settings: Any,
) -> None:
    """An engine on the fake GPU gives the tokens and logprobs of transformers, replays recorded
    steps, and never waits for the device. by_triton, kernels: see `engine_on_fake_gpu`. check:
    what compares the tokens and logprobs. replays: False = this model's steps run eagerly."""
    chosen = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "block_size": 4,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 2,
        "max_logprobs": -1,
        "generation_config": "vllm",
        "disable_log_stats": True,
        **settings,
    }
    running = engine_on_fake_gpu(reference.directory, by_triton, kernels, **chosen)
    with running as (llm, gpu):
        before = (gpu.host_reads, gpu.blocking_uploads)
        num_replays = gpu.replays
        llm.generate({"prompt_token_ids": [5, 7, 9]}, PARAMS, use_tqdm=False)
        assert (gpu.host_reads, gpu.blocking_uploads) == before, "no step waits for the device"
        assert not replays or gpu.replays - num_replays >= 2, "decodes are replayed"
        check(reference, llm)
