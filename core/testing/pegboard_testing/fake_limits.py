"""Limits of a small engine, for tests that build a part of an engine."""

from __future__ import annotations

from typing import Any

from pegboard.config.limits import Limits


def fake_limits(**values: Any) -> Limits:
    """Return `Limits` with the given values. All others are small, but large enough for the given
    ones."""
    values = {"max_model_len": 64, "vocab_size": 64, "max_num_seqs": 4, "block_size": 4} | values
    return Limits(
        **{"max_num_batched_tokens": max(values["max_model_len"], values["max_num_seqs"])} | values
    )
