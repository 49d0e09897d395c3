"""Spec of the model source `hub`."""

from __future__ import annotations

from pegboard.interfaces.model_source import ModelSourceSpec

HUB = ModelSourceSpec(
    api="1.0",
    implementation="pegboard_model_source_hub.hub:HubSource",
    flags=frozenset({"default"}),
)
