"""What a request says in `extra_args`, or `vllm_xargs` over HTTP: {"stop_repetition": true}. Runs
in the API process, without torch."""

from __future__ import annotations

from pegboard.data.sampling_params import SamplingParams


def stops(params: SamplingParams) -> object:
    """Return whether the output ends when it repeats itself."""
    return (params.extra_args or {}).get("stop_repetition", False)


def validate(params: SamplingParams) -> str | None:
    """Return what is wrong with the request, or None."""
    if not isinstance(stops(params), bool):
        return f"stop_repetition is {str(stops(params))[:100]}, expected true or false"
    if stops(params) and params.ignore_eos:
        return "stop_repetition has no meaning with ignore_eos; leave one of them out"
    return None
