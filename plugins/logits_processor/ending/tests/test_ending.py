"""The logits processor `ending`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pegboard_logits_processor_ending.options import EndingOptions
from pegboard_logits_processor_ending.processor import EndingProcessor
from pegboard_logits_processor_ending.request import validate

from pegboard import LLM, SamplingParams
from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessorSetup
from pegboard_testing.contract_logits_processor import (
    END,
    VOCAB_SIZE,
    VOCABULARY,
    LogitsProcessorContract,
)
from pegboard_testing.fake_limits import fake_limits


class TestEnding(LogitsProcessorContract):
    name = "ending"
    requests = ({}, {"ending_tokens": 1}, {"ending_tokens": 18}, {"ending_tokens": 1000})


def test_what_is_added_grows_to_the_strength() -> None:
    setup = LogitsProcessorSetup(fake_limits(vocab_size=VOCAB_SIZE), "cpu", lambda: VOCABULARY)
    processor = EndingProcessor(EndingOptions(strength=8), setup)
    params = SamplingParams(max_tokens=6, extra_args={"ending_tokens": 4}, eos_token_ids=[END])
    processor.update([AddedRow(0, params, np.array([1]), np.array([], int))], np.array([], int))
    added = []
    for _ in range(6):
        logits = processor.apply(
            torch.zeros(1, VOCAB_SIZE), torch.tensor([0]), torch.tensor([0]), list
        )
        assert not logits[0, :END].any()
        added.append(logits[0, END].item())
        processor.extend(np.array([0]), [[5]])
    assert added == [0, 0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("extra", "more", "told"),
    [
        ("4", {}, "expected a number"),
        (0, {}, "expected a number"),
        (True, {}, "expected"),
        (4, {"ignore_eos": True}, "ignore_eos"),
    ],
)
def test_a_wrong_request_is_explained(extra: object, more: dict[str, Any], told: str) -> None:
    assert told in str(validate(SamplingParams(extra_args={"ending_tokens": extra}, **more)))


@pytest.mark.real_model
def test_an_answer_ends_in_time(smollm2_gguf: Path) -> None:
    llm = LLM(
        str(smollm2_gguf),
        max_model_len=256,
        kv_cache_memory_bytes=1 << 27,
        logits_processors=["ending"],
    )
    try:
        asked = [
            SamplingParams(temperature=0, max_tokens=24, extra_args=extra)
            for extra in (None, {"ending_tokens": 12})
        ]
        plain, ending = (
            each.outputs[0]
            for each in llm.generate(["Once upon a time"] * 2, asked, use_tqdm=False)
        )
        assert (plain.finish_reason, ending.finish_reason) == ("length", "stop")
        assert ending.token_ids[:12] == plain.token_ids[:12] and len(ending.token_ids) <= 24
    finally:
        llm.shutdown()
