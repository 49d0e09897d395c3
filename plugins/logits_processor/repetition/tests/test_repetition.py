"""The logits processor `repetition`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pegboard_logits_processor_repetition.options import RepetitionOptions
from pegboard_logits_processor_repetition.processor import RepetitionProcessor
from pegboard_logits_processor_repetition.request import validate

from pegboard import LLM, SamplingParams
from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessorSetup
from pegboard_testing.contract_logits_processor import (
    END,
    VOCAB_SIZE,
    VOCABULARY,
    LogitsProcessorContract,
)
from pegboard_testing.fake_limits import fake_limits


class TestRepetition(LogitsProcessorContract):
    name = "repetition"
    options = {"min_count": 2, "max_pattern_size": 3}
    requests = ({}, {"stop_repetition": False}, {"stop_repetition": True})


def made(options: RepetitionOptions) -> RepetitionProcessor:
    return RepetitionProcessor(
        options, LogitsProcessorSetup(fake_limits(vocab_size=VOCAB_SIZE), "cpu", lambda: VOCABULARY)
    )


@given(
    tokens=st.lists(st.integers(0, 2), max_size=24),
    low=st.integers(1, 3),
    more=st.integers(0, 3),
    count=st.integers(2, 4),
)
def test_repetitions_are_those_of_the_definition(
    tokens: list[int], low: int, more: int, count: int
) -> None:
    options = RepetitionOptions(min_pattern_size=low, max_pattern_size=low + more, min_count=count)
    patterns = (
        tokens[-size:] for size in range(low, low + more + 1) if len(tokens) >= size * count
    )
    assert made(options).repeats(tokens) == any(
        tokens[-len(each) * count :] == each * count for each in patterns
    )


def test_a_forbidden_end_stays_forbidden() -> None:
    processor = made(RepetitionOptions(min_count=2))
    params = SamplingParams(extra_args={"stop_repetition": True}, eos_token_ids=[END])
    processor.update([AddedRow(0, params, np.array([5]), np.array([1, 1]))], np.array([], int))
    for forbidden in (True, False):
        logits = torch.zeros(1, VOCAB_SIZE)
        logits[0, END] = -torch.inf if forbidden else -3.0
        changed = processor.apply(logits, torch.tensor([0]), torch.tensor([0]), lambda: [[]])
        assert (changed[0].argmax() == END) != forbidden and not changed.isnan().any()


def test_a_wrong_request_is_explained() -> None:
    assert "expected true or false" in str(
        validate(SamplingParams(extra_args={"stop_repetition": 1}))
    )
    assert "ignore_eos" in str(
        validate(SamplingParams(extra_args={"stop_repetition": True}, ignore_eos=True))
    )


@pytest.mark.real_model
def test_a_loop_ends(smollm2_gguf: Path) -> None:
    """With drafts, it ends after the same token."""
    asked = [
        SamplingParams(temperature=0, max_tokens=100, extra_args=extra)
        for extra in (None, {"stop_repetition": True})
    ]
    answers = []
    for drafts in ({}, {"spec_method": "ngram", "spec_tokens": 4}):
        settings: dict[str, Any] = {
            "max_model_len": 256,
            "kv_cache_memory_bytes": 1 << 27,
            **drafts,
        }
        with LLM(str(smollm2_gguf), logits_processors=["repetition"], **settings) as llm:
            outputs = llm.generate(["one two one two one two one two"] * 2, asked, use_tqdm=False)
        plain, stopped = (each.outputs[0] for each in outputs)
        assert plain.finish_reason == "length" and stopped.finish_reason == "stop"
        assert stopped.token_ids[:-1] == plain.token_ids[: len(stopped.token_ids) - 1]
        answers.append(stopped.token_ids)
    assert answers[0] == answers[1]
