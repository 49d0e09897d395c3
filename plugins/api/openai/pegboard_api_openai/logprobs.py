"""Logprobs in the shapes of text completions and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pegboard_chat.logprobs import LOWEST, Step, TokenNames


def completion_logprobs(
    token_ids: Sequence[int], steps: Sequence[Step | None], num_top: int, names: TokenNames, start: int, first_token: str = ""
) -> dict[str, Any]:
    """Four parallel lists. num_top: alternatives to show beside the token itself, -1 = all there are. start: characters before
    the first token. A step that is None (the first token of a prompt) has no logprob, only its text, `first_token`."""
    offsets, tokens, chosen, top = [], [], [], []
    for token, step in zip(token_ids, steps, strict=True):
        entry = step.get(token) if step else None
        text = first_token if step is None else entry.decoded_token if entry else None
        tokens.append(names.name(token, text))
        offsets.append(start)
        start += len(text or "")
        chosen.append(None if step is None else max(entry.logprob, LOWEST) if entry else LOWEST)
        top.append(_top(token, step, num_top, names) if step else None)
    return {"text_offset": offsets, "token_logprobs": chosen, "tokens": tokens, "top_logprobs": top}


def _top(token: int, step: Step, num_top: int, names: TokenNames) -> dict[str, float]:
    if num_top >= 0 and len(step) > num_top + (token in step):  # a search looks at more of them than are asked for
        best = sorted(step, key=lambda other: -step[other].logprob)[:num_top]
        step = {other: step[other] for other in dict.fromkeys([token, *best]) if other in step}
    return {names.name(other, found.decoded_token): max(found.logprob, LOWEST) for other, found in step.items()}


def prompt_logprobs(steps: Sequence[Step | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's shape: per prompt token {token id: {logprob, rank, decoded_token}}, the first null."""
    if steps is None:
        return None
    return [
        {
            str(token): {"logprob": max(entry.logprob, LOWEST), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token, entry in step.items()
        }
        if step
        else None
        for step in steps
    ]
