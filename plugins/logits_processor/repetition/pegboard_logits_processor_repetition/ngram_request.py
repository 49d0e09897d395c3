"""What a request says in `extra_args`, or `vllm_xargs` over HTTP, with vLLM's names:
{"ngram_size": 30, "window_size": 90, "whitelist_token_ids": […]}. Runs in the API process, without
torch."""

from __future__ import annotations

from dataclasses import dataclass

from pegboard.data.sampling_params import SamplingParams

WINDOW = 100
"""The tokens that are looked at, if a request does not say."""
NAMES = ("ngram_size", "window_size", "whitelist_token_ids")


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
    allowed = given.get("whitelist_token_ids") or ()
    return Ngrams(given["ngram_size"], WINDOW if window is None else window, frozenset(allowed))


def validate(params: SamplingParams) -> str | None:
    """Return what is wrong with the request, or None."""
    given = params.extra_args or {}
    for name in NAMES[:2]:
        value = given.get(name)
        if value is not None and (type(value) is not int or value < 1):
            return f"{name} is {str(value)[:100]}, expected a whole number from 1 on"
    allowed = given.get("whitelist_token_ids")
    if allowed is not None and not (
        isinstance(allowed, list | tuple | set | frozenset)
        and all(type(token) is int for token in allowed)
    ):
        return f"whitelist_token_ids is {str(allowed)[:100]}, expected token ids"
    if given.get("ngram_size") is None and any(given.get(name) is not None for name in NAMES[1:]):
        return "window_size and whitelist_token_ids need ngram_size"
    return None
