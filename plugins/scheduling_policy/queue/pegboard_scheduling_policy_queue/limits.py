"""The step budget both policies give: the engine's limits, whatever the load."""

from __future__ import annotations

from pegboard.interfaces.scheduling_policy import SchedulingPolicySetup, StepBudget


def fixed_budget(setup: SchedulingPolicySetup) -> StepBudget:
    """The same budget for every step. A `long_prefill_token_threshold` of 0 does not cap the chunk of one prefill."""
    max_tokens = setup.max_num_batched_tokens
    threshold = setup.long_prefill_token_threshold
    return StepBudget(
        max_tokens=max_tokens,
        max_chunk=min(threshold, max_tokens) if threshold > 0 else max_tokens,
        max_prefills=setup.max_num_partial_prefills,
        max_long_prefills=setup.max_long_partial_prefills,
    )
