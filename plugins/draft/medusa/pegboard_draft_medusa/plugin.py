"""Specs of the draft plugin `medusa` and of its model."""

from __future__ import annotations

from pegboard.interfaces.draft import DraftSpec
from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.spec import AtMost

MEDUSA = DraftSpec(
    api="1.0",
    implementation="pegboard_draft_medusa.proposer:MedusaProposer",
    source="pegboard_draft_medusa.source:source",
    supports={"max_drafts": AtMost(128), "architecture": frozenset({"MedusaModel"})},
    flags=frozenset({"padded"}),
)
MEDUSA_MODEL = ModelSpec(
    api="1.0",
    implementation="pegboard_draft_medusa.model:MedusaModel",
    flags=frozenset({"tensor_parallel"}),
)
