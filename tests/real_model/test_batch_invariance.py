"""The default model gives the same bits in every batch if `batch_invariant` is set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pegboard import LLM, SamplingParams

pytestmark = pytest.mark.real_model

SHARED = "The planets of the solar system are Mercury, Venus, Earth, Mars and Jupiter. " * 17
PROMPTS = [
    "What is the capital of France?",
    f"{SHARED}Of these, the largest is",
    "Hi",
    f"{SHARED}The",
    "def add(a, b):",
    SHARED[:300],
]
"""The two longest share over 256 tokens, so that their rows could be read together."""
COMMON = {"max_tokens": 4, "logprobs": 3, "detokenize": False, "ignore_eos": True}
PARAMS = [
    SamplingParams(seed=number, top_p=0.9, **COMMON)
    if number % 2
    else SamplingParams(temperature=0, **COMMON)
    for number in range(len(PROMPTS))
]


def answers(llm: LLM, calls: Sequence[Sequence[int]]) -> list[Any]:
    """Return tokens, logprobs and ranks of each prompt, which are generated in these calls."""
    found = {}
    for numbers in calls:
        outputs = llm.generate(
            [PROMPTS[number] for number in numbers],
            [PARAMS[number] for number in numbers],
            use_tqdm=False,
        )
        for number, output in zip(numbers, outputs, strict=True):
            rows = [
                {token: (item.logprob, item.rank) for token, item in row.items()}
                for row in output.outputs[0].logprobs or []
            ]
            found[number] = output.outputs[0].token_ids, rows
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": "float32", "plugin_options": {"quantization.gguf": {"compute": "float"}}}],
    ids=["as stored", "float32"],
)
def test_every_batch_gives_the_same_bits(settings: dict[str, Any]) -> None:
    llm = LLM(
        batch_invariant=True,
        max_model_len=1024,
        kv_cache_memory_bytes=100 << 20,
        max_num_batched_tokens=100,
        **settings,
    )
    numbers = [4, 0, 5, 2] if settings else [3, 0, 5, 1, 4, 2]
    expected = answers(llm, [numbers])
    alone = [[number] for number in sorted(numbers)]
    assert answers(llm, alone) == expected, "alone, from the cache"
    assert llm.reset_prefix_cache()
    assert answers(llm, [sorted(numbers)[2:], sorted(numbers)[:2]]) == expected, "in other batches"
