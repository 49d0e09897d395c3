"""Spec of the draft plugin `suffix`."""

from __future__ import annotations

from pegboard.interfaces.draft import DraftSpec
from pegboard.interfaces.spec import AtMost

SUFFIX = DraftSpec(
    api="1.0",
    implementation="pegboard_draft_suffix.proposer:SuffixProposer",
    options="pegboard_draft_suffix.options:SuffixOptions",
    supports={"max_drafts": AtMost(128)},
)
