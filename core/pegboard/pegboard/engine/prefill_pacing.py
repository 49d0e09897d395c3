"""Prefill pacing: chunks of a size that keeps the time between two tokens under a bound (`target_itl_ms`).

A decoding request waits for everything else in its step. A step lasts about `fixed + per_token * prefill tokens`; both are
learned from the steps before, so that the chunk follows the machine, the batch and the length of what is attended to.
"""

from __future__ import annotations

from dataclasses import replace

from pegboard.interfaces.scheduling_policy import StepBudget, StepLoad

FIRST_CHUNK = 32
"""Prefill tokens in a step with decodes before any speed is known."""

MIN_CHUNK = 8
"""Prefill tokens that a step may always compute, so that prompts make progress on any machine and under any bound."""

MARGIN = 0.9
"""Part of the bound that is planned for. The rest is a reserve for variation."""

WEIGHT_SLOWER, WEIGHT_FASTER = 0.5, 0.1
"""Weight of a new measurement in its running mean: a slower step counts at once, a faster one only when it repeats."""


class PrefillPacing:
    """target_s: how long a step with decodes should last at most. `limit` is called before every step, `observe` after it."""

    def __init__(self, target_s: float) -> None:
        self._target_s = MARGIN * target_s
        self._fixed_s: float | None = None
        self._per_token_s: float | None = None

    def limit(self, budget: StepBudget, load: StepLoad) -> StepBudget:
        """The policy's budget, cut to fit the bound. Unchanged while no request decodes."""
        if load.num_decodes == 0:
            return budget
        chunk = FIRST_CHUNK
        if self._per_token_s is not None:
            left_s = self._target_s - (self._fixed_s or 0.0)
            chunk = max(MIN_CHUNK, int(left_s / max(self._per_token_s, 1e-9)))
        max_tokens = min(budget.max_tokens, load.num_decodes + chunk)
        return replace(budget, max_tokens=max_tokens, max_chunk=min(budget.max_chunk, chunk))

    def observe(self, num_prefill_tokens: int, seconds: float) -> None:
        """A step that computed so many prompt tokens and one token of each decoding row."""
        if num_prefill_tokens == 0:
            self._fixed_s = _mean(self._fixed_s, seconds)
        elif num_prefill_tokens >= MIN_CHUNK:  # fewer tokens say little about the time of one
            above_fixed = max(seconds - (self._fixed_s or 0.0), 0.1 * seconds)
            self._per_token_s = _mean(self._per_token_s, above_fixed / num_prefill_tokens)


def _mean(before: float | None, new: float) -> float:
    if before is None:
        return new
    return before + (WEIGHT_SLOWER if new > before else WEIGHT_FASTER) * (new - before)
