"""`target_itl_ms`: prefill chunks are made so small that a step with decodes stays under the
bound."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.config.schema import EngineConfig, check_engine
from pegboard.data.batch import Batch, StepOutput, StepTimes, TokenMasks
from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.prefill_pacing import MIN_CHUNK, PrefillPacing
from pegboard.errors import ConfigError
from pegboard.interfaces.scheduling_policy import StepBudget, StepLoad
from pegboard_testing.fake_engine import FakeEngine


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


BUDGET = StepBudget(max_tokens=512, max_chunk=512, max_prefills=1, max_long_prefills=1)


@given(
    fixed_ms=st.floats(1, 30),
    per_token_ms=st.floats(0.05, 3),
    target_ms=st.floats(20, 500),
    noise=st.floats(0, 0.05),
    seed=st.integers(0, 99),
)
def test_steps_come_to_fit_the_bound(
    fixed_ms: float, per_token_ms: float, target_ms: float, noise: float, seed: int
) -> None:
    """After a few steps the bound holds on a machine of any speed, and most of the allowed time is
    used."""
    rng = np.random.default_rng(seed)
    size = PrefillPacing(target_ms / 1000)
    took = []
    for step in range(60):
        load = StepLoad(num_decodes=4, num_waiting=0)
        budget = size.limit(BUDGET, load)
        num_prefill = budget.max_chunk if step % 3 else 0
        milliseconds = (fixed_ms + per_token_ms * num_prefill) * (1 + noise * rng.uniform(-1, 1))
        size.observe(num_prefill, milliseconds / 1000)
        if num_prefill and step > 20:
            took.append((num_prefill, milliseconds))
    for num_prefill, milliseconds in took:
        assert milliseconds <= target_ms or num_prefill == MIN_CHUNK
        assert (
            milliseconds >= 0.6 * target_ms
            or num_prefill == BUDGET.max_chunk
            or per_token_ms > 0.1 * target_ms
        )


def test_no_limit_while_no_request_decodes() -> None:
    size = PrefillPacing(0.001)
    size.observe(100, 10.0)
    assert size.limit(BUDGET, StepLoad(0, 5)) is BUDGET


def test_a_policy_that_gives_less_is_left_alone() -> None:
    small = StepBudget(max_tokens=20, max_chunk=4, max_prefills=2, max_long_prefills=1)
    assert PrefillPacing(1.0).limit(small, StepLoad(3, 0)) == small


class Measured:
    """Replaces the worker's `run`: a step takes 1 ms, and 1 ms more for each token after the first
    of a row."""

    def __init__(
        self, run: Callable[[Batch, Callable[[], TokenMasks] | None], Callable[[], StepOutput]]
    ) -> None:
        self._run = run
        self.mixed: list[int] = []

    def __call__(
        self, batch: Batch, masks: Callable[[], TokenMasks] | None
    ) -> Callable[[], StepOutput]:
        output = self._run(batch, masks)()
        num_prefill = batch.num_tokens - batch.num_rows
        if num_prefill and (batch.num_scheduled_tokens == 1).any():
            self.mixed.append(num_prefill)
        output.times = StepTimes(prepare_s=0.0005, forward_s=0.0005 + 0.001 * num_prefill)
        return lambda: output


def test_the_engine_cuts_prompts_while_others_decode() -> None:
    """The tokens are the same as without the bound, and the steps stay under it."""
    answers = []
    for target_itl_s in (0.0, 0.016):
        engine = FakeEngine(
            max_model_len=256,
            max_num_batched_tokens=128,
            target_itl_s=target_itl_s,
            enable_prefix_caching=False,
        )
        measured = engine.executor.worker.run = Measured(engine.executor.worker.run)  # type: ignore[method-assign]
        engine.add("talks", range(5), greedy(60))
        engine.step()
        for index in range(3):
            engine.add(f"long {index}", [index] * 100, greedy(3))
        engine.run()
        answers.append({name: result.token_ids for name, result in engine.results.items()})
        engine.check_idle()
        assert max(measured.mixed) > 90 if not target_itl_s else max(measured.mixed[1:]) <= 15, (
            measured.mixed
        )
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "settings", [{"target_itl_ms": 0.0}, {"target_itl_ms": 50.0, "enable_chunked_prefill": False}]
)
def test_impossible_bounds_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="target_itl_ms"):
        check_engine(EngineConfig(**settings))  # type: ignore[arg-type]
