"""Spec of the draft plugin `ngram`."""

from __future__ import annotations

from pegboard.interfaces.draft import DraftSpec
from pegboard.interfaces.spec import AtMost

NGRAM = DraftSpec(
    api="1.0",
    implementation="pegboard_draft_ngram.proposer:NGramProposer",
    options="pegboard_draft_ngram.options:NGramOptions",
    supports={"max_drafts": AtMost(128)},
)
