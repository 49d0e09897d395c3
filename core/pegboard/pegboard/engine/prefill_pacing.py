"""Prefill pacing: limits the size of prefill chunks, so that the time between two tokens stays
under a bound (`target_itl_ms`).

A decoding request waits for everything else in its step. A step lasts about `fixed + per_token *
prefill tokens`; both are learned from earlier steps. So the chunk size adapts to the machine, the
batch and the context lengths.
"""

from __future__ import annotations

from dataclasses import replace

from pegboard.interfaces.scheduling_policy import StepBudget, StepLoad

FIRST_CHUNK = 32
"""Number of prefill tokens in a step with decodes before any speed is known."""

MIN_CHUNK = 8
"""Number of prefill tokens that a step may always compute, so that prompts make progress on any
machine and under any bound."""

MARGIN = 0.9
"""The fraction of the bound that a step may use. The rest is a reserve for variation."""

WEIGHT_SLOWER = 0.5
WEIGHT_FASTER = 0.1
"""Weight of a new measurement in the running mean. A slower step has a large weight. A faster one
has a small weight, so it must repeat to have an effect."""


class PrefillPacing:
    """target_s: the maximum duration of a step with decodes, in seconds. `limit` is called before
    every step and `observe` after it."""

    def __init__(self, target_s: float) -> None:
        self._target_s = MARGIN * target_s
        self._fixed_s: float | None = None
        self._per_token_s: float | None = None

    def limit(self, budget: StepBudget, load: StepLoad) -> StepBudget:
        """Return the policy's budget, reduced to meet the bound. While no request decodes, it is
        unchanged."""
        if load.num_decodes == 0:
            return budget
        chunk = FIRST_CHUNK
        if self._per_token_s is not None:
            left_s = self._target_s - (self._fixed_s or 0.0)
            chunk = max(MIN_CHUNK, int(left_s / max(self._per_token_s, 1e-9)))
        max_tokens = min(budget.max_tokens, load.num_decodes + chunk)
        return replace(budget, max_tokens=max_tokens, max_chunk=min(budget.max_chunk, chunk))

    def observe(self, num_prefill_tokens: int, seconds: float) -> None:
        """Learn from a step that computed `num_prefill_tokens` prompt tokens and one token of each
        decoding row."""
        if num_prefill_tokens == 0:
            self._fixed_s = _mean(self._fixed_s, seconds)
        elif num_prefill_tokens >= MIN_CHUNK:
            # with fewer tokens, the time per token cannot be measured well
            above_fixed = max(seconds - (self._fixed_s or 0.0), 0.1 * seconds)
            self._per_token_s = _mean(self._per_token_s, above_fixed / num_prefill_tokens)


def _mean(before: float | None, new: float) -> float:
    if before is None:
        return new
    return before + (WEIGHT_SLOWER if new > before else WEIGHT_FASTER) * (new - before)
