"""What a request says in `extra_args`, or `vllm_xargs` over HTTP, with vLLM's names:
{"ngram_size": 30, "window_size": 90, "whitelist_token_ids": […]}. Runs in the API process, without
torch."""

from __future__ import annotations

from dataclasses import dataclass

from pegboard.data.sampling_params import SamplingParams

WINDOW = 100
"""The tokens that are looked at, if a request does not say."""
MOST = {"ngram_size": 256, "window_size": 16_384}
"""More would take milliseconds for each token."""
ALLOWED = "whitelist_token_ids"
MOST_ALLOWED = 4096


@dataclass(frozen=True)
class Ngrams:
    """size: tokens that follow each other only once among the last `window`. allowed: tokens that
    may come anyway."""

    size: int
    window: int
    allowed: frozenset[int]


def ngrams_of(params: SamplingParams) -> Ngrams | None:
    """Return what a request asks for, None if nothing."""
    given = params.extra_args or {}
    if given.get("ngram_size") is None:
        return None
    window = given.get("window_size")
    allowed = given.get(ALLOWED) or ()
    return Ngrams(given["ngram_size"], WINDOW if window is None else window, frozenset(allowed))


def validate(params: SamplingParams) -> str | None:
    """Return what is wrong with the request, or None."""
    given = params.extra_args or {}
    for name, most in MOST.items():
        value = given.get(name)
        if value is not None and (type(value) is not int or not 1 <= value <= most):
            return f"{name} is {str(value)[:100]}, expected a whole number from 1 to {most}"
    allowed = given.get(ALLOWED)
    if allowed is not None and not (
        isinstance(allowed, list | tuple | set | frozenset)
        and len(allowed) <= MOST_ALLOWED
        and all(type(token) is int and 0 <= token < 2**31 for token in allowed)
    ):
        return f"{ALLOWED} is {str(allowed)[:100]}, expected at most {MOST_ALLOWED} token ids"
    others = ("window_size", ALLOWED)
    if given.get("ngram_size") is None and any(given.get(name) is not None for name in others):
        return "window_size and whitelist_token_ids need ngram_size"
    return None
