"""The processor keeps what the definition keeps, for rows that come and go."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_logits_processor_top_n_sigma.processor import TopNSigma
from pegboard_logits_processor_top_n_sigma.request import validate

from pegboard.data.sampling_params import SamplingParams
from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessorSetup
from pegboard.interfaces.tokenizer import Vocabulary
from pegboard_testing.contract_logits_processor import LogitsProcessorContract
from pegboard_testing.fake_limits import fake_limits

NUM_ROWS = 4
PROMPT = np.array([1, 2])


class TestContract(LogitsProcessorContract):
    name = "top_n_sigma"
    requests = ({}, {"top_n_sigma": 0.5}, {"top_n_sigma": 2})


def asking(n: object) -> SamplingParams:
    return SamplingParams(extra_args=None if n is None else {"top_n_sigma": n})


def kept(logits: np.ndarray, n: float | None) -> list[bool]:
    """Return which tokens stay, from the definition."""
    allowed = np.isfinite(logits)
    least = -np.inf if n is None else logits.max() - n * logits[allowed].std()
    return [
        bool(ok and (value >= least or np.isclose(value, least, atol=1e-4)))
        for ok, value in zip(allowed, logits, strict=True)
    ]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_rows_keep_what_the_definition_keeps(data: st.DataObject) -> None:
    processor = TopNSigma(
        None,
        LogitsProcessorSetup(
            fake_limits(max_num_seqs=NUM_ROWS), "cpu", lambda: Vocabulary((), frozenset(), ())
        ),
    )
    held: dict[int, float | None] = {}
    for _ in range(data.draw(st.integers(1, 4))):
        removed = [row for row in held if data.draw(st.booleans())]
        held = {row: n for row, n in held.items() if row not in removed}
        free = [row for row in range(NUM_ROWS) if row not in held and data.draw(st.booleans())]
        added = {row: data.draw(st.sampled_from([None, 0.5, 1, 2.5])) for row in free}
        held |= added
        processor.update(
            [AddedRow(row, asking(n), PROMPT, PROMPT[:0]) for row, n in added.items()],
            np.array(removed, int),
        )
        rows = data.draw(st.permutations(sorted(held)))
        rng = np.random.default_rng(data.draw(st.integers(0, 999)))
        before = rng.normal(size=(len(rows), 20)).astype(np.float32) * 4
        before[rng.random(before.shape) < 0.2] = -np.inf
        before[:, 0] = 1.0
        logits = torch.from_numpy(before.copy())
        found = processor.apply(
            logits, torch.tensor(rows, dtype=torch.int64), torch.zeros(len(rows)), list
        )
        assert found is logits
        for row, old, new in zip(rows, before, logits.numpy(), strict=True):
            assert np.isfinite(new).tolist() == kept(old, held[row])
            assert (
                new.argmax() == old.argmax()
                and (new[np.isfinite(new)] == old[np.isfinite(new)]).all()
            )


@pytest.mark.parametrize(
    "n", ["1", 0, -1.0, True, [1], float("nan"), float("inf"), 10**400], ids=repr
)
def test_a_wrong_request_is_explained(n: object) -> None:
    assert "expected a number greater than 0" in str(validate(asking(n)))


def test_a_right_request_is_accepted() -> None:
    assert (
        validate(asking(1)) is None
        and validate(asking(0.5)) is None
        and validate(asking(None)) is None
    )
