"""Spec of the draft plugin `draft_model`."""

from __future__ import annotations

from pegboard.interfaces.draft import DraftSpec
from pegboard.interfaces.spec import AtMost

DRAFT_MODEL = DraftSpec(
    api="1.0",
    implementation="pegboard_draft_draft_model.proposer:ModelProposer",
    source="pegboard_draft_draft_model.source:source",
    flags=frozenset({"stores", "padded"}),
    tier="reference",  # methods that know the architecture come before it
    supports={"max_drafts": AtMost(128), "architecture": True},
)
