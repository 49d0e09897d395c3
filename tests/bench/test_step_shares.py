"""The timers of the bench find the parts of a real engine."""

from __future__ import annotations

import pytest
from step_shares import measure_shares

from pegboard import LLM


@pytest.mark.real_model
def test_parts_of_a_decode_step_are_measured() -> None:
    llm = LLM(max_num_seqs=2, max_model_len=128)
    try:
        shares = measure_shares(llm, [[1, 2, 3, 4]] * 2, [6, 6])
    finally:
        llm.shutdown()
    parts = shares["milliseconds"]
    assert shares["num_steps"] == 4
    assert min(parts[name] for name in ("step", "schedule", "forward", "sample")) > 0
    assert shares["share"] < 1
