"""Specs of the draft plugin `mlp_speculator` and of its model."""

from __future__ import annotations

from pegboard.interfaces.draft import DraftSpec
from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.spec import AtMost

MLP_SPECULATOR = DraftSpec(
    api="1.0",
    implementation="pegboard_draft_mlp_speculator.proposer:SpeculatorProposer",
    source="pegboard_draft_mlp_speculator.source:source",
    supports={
        "max_drafts": AtMost(128),
        "architecture": frozenset({"MLPSpeculatorPreTrainedModel"}),
    },
    flags=frozenset({"padded"}),
)
MLP_SPECULATOR_MODEL = ModelSpec(
    api="1.0",
    implementation="pegboard_draft_mlp_speculator.model:MLPSpeculator",
    flags=frozenset({"tensor_parallel"}),
)
