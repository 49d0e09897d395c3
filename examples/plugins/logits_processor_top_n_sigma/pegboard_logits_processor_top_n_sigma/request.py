"""What a request says. Runs in the API process, so it does not import torch."""

from __future__ import annotations

from pegboard.data.sampling_params import SamplingParams

MAX_N = 1000
"""The largest `top_n_sigma`. With it, every logit is within the limit, so none is removed."""


def asked(params: SamplingParams) -> object:
    """Return what the request says, or None."""
    return (params.extra_args or {}).get("top_n_sigma")


def validate(params: SamplingParams) -> str | None:
    """Return what is wrong with the request, or None."""
    n = asked(params)
    is_right = n is None or (
        isinstance(n, int | float) and not isinstance(n, bool) and 0 < n <= MAX_N
    )
    return (
        None
        if is_right
        else f"top_n_sigma is {str(n)[:100]}, expected a number greater than 0 and at most {MAX_N}"
    )
