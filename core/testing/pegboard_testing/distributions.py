"""Distributions over a vocabulary, and whether counts fit them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pegboard.data.sampling_params import SamplingParams

NEG_INF = float("-inf")


def processed_logits(
    logits: Sequence[float] | np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    outputs: Sequence[int],
    *,
    allowed: Sequence[bool] | None = None,
) -> np.ndarray:
    """Return float64 [V], the processed logits of one row, computed one operation at a time in the
    documented order."""
    x = [float(value) for value in logits]
    ids = range(len(x))
    if allowed is not None:
        x = [value if ok else NEG_INF for value, ok in zip(x, allowed, strict=True)]
    if params.allowed_token_ids is not None:
        x = [x[t] if t in params.allowed_token_ids else NEG_INF for t in ids]
    for word in params.bad_words_token_ids:
        before = list(word[:-1])
        if not before or list(outputs[-len(before) :]) == before:
            x[word[-1]] = NEG_INF
    if len(outputs) < params.min_tokens:
        for token in params.all_stop_token_ids:
            x[token] = NEG_INF
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in {*prompt, *outputs}:
        r = params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(outputs):
        x[token] -= params.frequency_penalty * list(outputs).count(token) + params.presence_penalty
    if params.is_greedy:
        return np.array(x)
    x = [value / params.temperature for value in x]
    x = [value if math.exp(value - max(x)) >= params.min_p else NEG_INF for value in x]
    if 0 < params.top_k < len(x):
        kth = sorted(x, reverse=True)[params.top_k - 1]
        x = [value if value >= kth else NEG_INF for value in x]
    if params.top_p < 1:
        probs = softmax(np.array(x))
        cumulative = 0.0
        dropped = set()
        for token in sorted(ids, key=lambda t: x[t])[:-1]:
            cumulative += probs[token]
            if cumulative <= 1 - params.top_p:
                dropped.add(token)
        x = [NEG_INF if t in dropped else x[t] for t in ids]
    return np.array(x)


def softmax(x: np.ndarray) -> np.ndarray:
    """Return the softmax over the last dimension in float64."""
    weights = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Return the log-softmax of [V] in float64. −inf stays −inf."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(softmax(x)))


def chi_square_fits(observed: np.ndarray, probs: np.ndarray) -> bool:
    """Return whether counts [V] are a plausible sample of probs [V] by chi-square (Wilson and
    Hilferty 1931). A right sample fails about once in 10⁵. Tokens expected less than five times
    count as one token. Tokens with probability 0 must not occur."""
    expected = probs * observed.sum()
    if observed[probs == 0].any():
        return False
    rare = expected < 5
    groups = [(observed[t], expected[t]) for t in np.flatnonzero(~rare)]
    if expected[rare].sum() >= 1:
        groups.append((observed[rare].sum(), expected[rare].sum()))
    degrees = len(groups) - 1
    if degrees < 1:
        return True
    statistic = sum((o - e) ** 2 / e for o, e in groups)
    spread = 2 / (9 * degrees)
    return bool((statistic / degrees) ** (1 / 3) < 1 - spread + 4.3 * math.sqrt(spread))
