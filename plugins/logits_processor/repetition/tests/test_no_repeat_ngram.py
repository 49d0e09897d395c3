"""The logits processor `no_repeat_ngram`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pegboard_logits_processor_repetition.ngram_request import Ngrams, ngrams_of, validate
from pegboard_logits_processor_repetition.ngrams import banned_tokens

from pegboard import LLM, SamplingParams
from pegboard_testing.contract_logits_processor import LogitsProcessorContract


class TestNgrams(LogitsProcessorContract):
    name = "no_repeat_ngram"
    requests = ({}, {"ngram_size": 2}, {"ngram_size": 1, "window_size": 3})


@given(
    st.lists(st.integers(0, 3), max_size=30),
    st.integers(1, 4),
    st.integers(1, 20),
    st.frozensets(st.integers(0, 3), max_size=2),
)
def test_no_ngram_comes_twice(
    outputs: list[int], size: int, window: int, allowed: frozenset[int]
) -> None:
    tail = outputs[max(0, len(outputs) - window) :]
    seen = {tuple(tail[i : i + size]) for i in range(len(tail) - size + 1)}
    last = tuple(tail[len(tail) - size + 1 :]) if size > 1 else ()
    expected = [token for token in range(4) if (*last, token) in seen and token not in allowed]
    asked = Ngrams(size, window, allowed)
    assert banned_tokens(outputs, asked) == (expected if len(tail) >= size else [])


def test_what_a_request_says() -> None:
    assert ngrams_of(SamplingParams()) is None
    asked = {"ngram_size": 3, "whitelist_token_ids": [4, 5]}
    assert ngrams_of(SamplingParams(extra_args=asked)) == Ngrams(3, 100, frozenset({4, 5}))


@pytest.mark.parametrize(
    ("given_args", "told"),
    [
        ({"ngram_size": 0}, "ngram_size is 0"),
        ({"ngram_size": True}, "ngram_size is True"),
        ({"ngram_size": 2, "window_size": "a"}, "window_size is a"),
        ({"ngram_size": 2, "whitelist_token_ids": [1, "a"]}, "expected at most 4096 token ids"),
        ({"ngram_size": 2, "whitelist_token_ids": 7}, "expected at most 4096 token ids"),
        ({"ngram_size": 257}, "from 1 to 256"),
        ({"ngram_size": 2, "window_size": 10**30}, "from 1 to 16384"),
        ({"ngram_size": 2, "whitelist_token_ids": [10**30]}, "expected at most 4096 token ids"),
        ({"window_size": 2}, "need ngram_size"),
    ],
)
def test_what_is_wrong(given_args: dict[str, Any], told: str) -> None:
    assert told in (validate(SamplingParams(extra_args=given_args)) or "")


def test_outputs_of_a_model(smollm2_gguf: Path) -> None:
    """Greedy, it repeats itself; with the processor, no two tokens come twice."""
    size = 2
    params = [
        SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, extra_args=extra)
        for extra in (None, {"ngram_size": size, "window_size": 1000})
    ]
    with LLM(str(smollm2_gguf), logits_processors=["no_repeat_ngram"], max_model_len=128) as llm:
        plain, changed = llm.generate(["one two one two one two"] * 2, params, use_tqdm=False)

    def pairs(output: Any) -> list[tuple[int, ...]]:
        tokens = output.outputs[0].token_ids
        return [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]

    assert len({*pairs(plain)}) < len(pairs(plain))
    assert len({*pairs(changed)}) == len(pairs(changed))
