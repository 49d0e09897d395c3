"""Spec of the pooler plugin `sentence`."""

from __future__ import annotations

from pegboard.interfaces.pooler import PoolerSpec

SENTENCE = PoolerSpec(
    api="3.0",
    implementation="pegboard_pooler_sentence.pooler:SentencePooler",
    plan="pegboard_pooler_sentence.plan:plan",
)
