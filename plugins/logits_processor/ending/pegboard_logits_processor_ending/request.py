"""What a request says in `extra_args`, or `vllm_xargs` over HTTP: {"ending_tokens": 40}. Runs in
the API process, without torch."""

from __future__ import annotations

from pegboard.data.sampling_params import SamplingParams


def ending_tokens(params: SamplingParams) -> object:
    """Return over how many of the last tokens the end becomes likelier, or None."""
    return (params.extra_args or {}).get("ending_tokens")


def validate(params: SamplingParams) -> str | None:
    """Return what is wrong with the request, or None."""
    wanted = ending_tokens(params)
    if wanted is None:
        return None
    if type(wanted) is not int or wanted < 1:
        return f"ending_tokens is {str(wanted)[:100]}, expected a number of tokens from 1 on"
    if params.ignore_eos:
        return "ending_tokens has no meaning with ignore_eos; leave one of them out"
    return None
