"""The step budget of both policies. It is given by the engine's limits, whatever the load."""

from __future__ import annotations

from pegboard.interfaces.scheduling_policy import SchedulingPolicySetup, StepBudget


def fixed_budget(setup: SchedulingPolicySetup) -> StepBudget:
    """Returns the same budget for every step."""
    limits = setup.limits
    return StepBudget(
        max_tokens=limits.max_num_batched_tokens,
        max_chunk=min(limits.long_prefill_token_threshold, limits.max_num_batched_tokens),
        max_prefills=limits.max_num_partial_prefills,
        max_long_prefills=limits.max_long_partial_prefills,
    )
