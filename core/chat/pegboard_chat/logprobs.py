"""Logprobs in OpenAI's shapes. JSON has no -inf: impossible tokens get -9999.0, as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.data.output import Logprob

Step = Mapping[int, Logprob]

LOWEST = -9999.0


class TokenNames:
    """How tokens are named in a response: their text, or "token_id:7" (`as_ids`, and where a token has no text).

    token_bytes[i]: the bytes of token i, for `bytes` in chat logprobs; pieces of one character can be joined only as bytes.
    """

    def __init__(self, *, as_ids: bool, token_bytes: Sequence[bytes] = ()) -> None:
        self._as_ids = as_ids
        self._token_bytes = token_bytes

    def name(self, token: int, text: str | None) -> str:
        return f"token_id:{token}" if self._as_ids or text is None else text

    def bytes_of(self, token: int, text: str | None) -> list[int]:
        known = self._token_bytes[token] if 0 <= token < len(self._token_bytes) else b""
        return list(known or (text or "").encode("utf-8", "replace"))


def chat_logprobs(token_ids: Sequence[int], steps: Sequence[Step] | None, num_top: int, names: TokenNames) -> dict[str, Any]:
    """{"content": [one entry per token]}. num_top: alternatives to show, -1 = all there are."""
    steps = steps or [{}] * len(token_ids)
    return {"content": [_chat_entry(token, step, num_top, names) for token, step in zip(token_ids, steps, strict=True)]}


def _chat_entry(token: int, step: Step, num_top: int, names: TokenNames) -> dict[str, Any]:
    best = sorted(step.items(), key=lambda item: -item[1].logprob)
    chosen = _named(token, step.get(token) or Logprob(LOWEST), names)
    chosen["top_logprobs"] = [_named(other, entry, names) for other, entry in (best if num_top < 0 else best[:num_top])]
    return chosen


def _named(token: int, entry: Logprob, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.name(token, entry.decoded_token),
        "logprob": max(entry.logprob, LOWEST),
        "bytes": names.bytes_of(token, entry.decoded_token),
    }
