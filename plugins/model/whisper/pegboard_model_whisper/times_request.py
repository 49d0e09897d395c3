"""What a request that wants times says in `extra_args`: {"whisper_times": [end of the answer, no
times, first time]}, which are token ids. Runs in the API process, without torch."""

from __future__ import annotations

from pegboard.data.sampling_params import SamplingParams

NAME = "whisper_times"


def times_of(params: SamplingParams) -> list[int] | None:
    """Return the three ids, or None if the request wants no times."""
    given: list[int] | None = (params.extra_args or {}).get(NAME)
    return given


def validate(params: SamplingParams) -> str | None:
    """Return what is wrong with the request, or None."""
    given = times_of(params)
    if given is None:
        return None
    is_right = (
        isinstance(given, list)
        and len(given) == 3
        and all(type(token) is int and 0 <= token < 2**31 for token in given)
        and given[0] < given[1] < given[2]
    )
    if not is_right:
        return (
            f"{NAME} is {str(given)[:100]}, expected the ids of the tokens <|endoftext|>, "
            "<|notimestamps|> and <|0.00|>, in this order"
        )
    return None
