"""Specs of the draft plugins `eagle` and `eagle3`, and of their models."""

from __future__ import annotations

from pegboard.interfaces.draft import DraftSpec
from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.spec import AtMost

DIVIDES = frozenset({"tensor_parallel"})


def _spec(method: str) -> DraftSpec:
    return DraftSpec(
        api="1.0",
        implementation="pegboard_draft_eagle.proposer:EagleProposer",
        source=f"pegboard_draft_eagle.source:{method}",
        suits=f"pegboard_draft_eagle.source:suits_{method}",
        flags=frozenset({"stores", "padded"}),
        supports={"max_drafts": AtMost(128), "architecture": True},
    )


EAGLE = _spec("eagle")
EAGLE3 = _spec("eagle3")
EAGLE_LLAMA = ModelSpec(
    api="1.0", implementation="pegboard_draft_eagle.llama:EagleLlama", flags=DIVIDES
)
EAGLE3_LLAMA = ModelSpec(
    api="1.0", implementation="pegboard_draft_eagle.llama3:Eagle3Llama", flags=DIVIDES
)
