"""The tokens of a prompt that attend to those after them, so that no step computes only the first
ones of them.

Their keys depend on all of the span, and so does the hash of its first block. That is why a cached
prefix may end inside a span: what it has was computed with the whole span, and the rest attends to
it as it did then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pegboard.config.limits import Limits
from pegboard.data.request import EngineRequest
from pegboard.errors import RequestError

Span = tuple[int, int]
"""(first position, position after the last one)"""


def whole_spans(request: EngineRequest, whole: Literal["items", "prompt"] | None) -> Iterator[Span]:
    """Yield the spans of a request, in order. whole: see `Limits`."""
    if whole == "prompt":
        yield 0, len(request.prompt_token_ids)
    elif whole == "items":
        for item in request.media:
            yield from ((start, start + count) for start, count in item.places)


def check_whole(request: EngineRequest, limits: Limits) -> None:
    """Raise RequestError if a span cannot be computed in one step."""
    most = limits.max_num_batched_tokens
    for start, stop in whole_spans(request, limits.whole):
        if stop - start > most:
            what = "the prompt" if limits.whole == "prompt" else f"the item at token {start}"
            raise RequestError(
                f"{what} has {stop - start} tokens, which this model computes in one step, and a "
                f"step takes max_num_batched_tokens={most}; raise it, or shorten the prompt",
                parameter="prompt",
            )
    if limits.whole != "prompt":
        return
    rows = {item.digest: item.num_rows for item in request.media}
    for name, room in (
        ("max_num_encoder_input_tokens", limits.max_num_encoder_input_tokens),
        ("encoder_cache_size", limits.encoder_cache_size),
    ):
        if len(rows) > 1 and sum(rows.values()) > room:
            raise RequestError(
                f"the items of the prompt have {sum(rows.values())} rows, which this model needs "
                f"in one step, and {name} is {room}; raise it, or leave items out",
                parameter="prompt",
            )


def cut(spans: tuple[Span, ...], start: int, num_tokens: int, most: int = 0) -> int:
    """Return how many of the tokens from `start` on a step computes, if it should be `num_tokens`
    and can be `most`: it ends before a span, or if it begins in that, at its end."""
    stop = start + num_tokens
    for first, end in spans:
        if first < stop < end:
            if first > start:
                return first - start
            return end - start if end - start <= most else 0
    return num_tokens
