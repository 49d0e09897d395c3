"""Specs of the draft plugins `eagle` and `eagle3`, and of their models."""

from __future__ import annotations

from pegboard.interfaces.draft import DraftSpec
from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.spec import AtMost

STORES = frozenset({"stores"})
DIVIDES = frozenset({"tensor_parallel"})

EAGLE = DraftSpec(
    api="1.0",
    implementation="pegboard_draft_eagle.proposer:EagleProposer",
    source="pegboard_draft_eagle.source:eagle",
    suits="pegboard_draft_eagle.source:suits_eagle",
    flags=STORES,
    supports={"max_drafts": AtMost(128), "architecture": True},
)
EAGLE3 = DraftSpec(
    api="1.0",
    implementation="pegboard_draft_eagle.proposer:EagleProposer",
    source="pegboard_draft_eagle.source:eagle3",
    suits="pegboard_draft_eagle.source:suits_eagle3",
    flags=STORES,
    supports={"max_drafts": AtMost(128), "architecture": True},
)
EAGLE_LLAMA = ModelSpec(
    api="1.0", implementation="pegboard_draft_eagle.llama:EagleLlama", flags=DIVIDES
)
EAGLE3_LLAMA = ModelSpec(
    api="1.0", implementation="pegboard_draft_eagle.llama3:Eagle3Llama", flags=DIVIDES
)
