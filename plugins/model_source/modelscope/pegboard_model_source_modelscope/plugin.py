"""Spec of the model source `modelscope`."""

from __future__ import annotations

from pegboard.interfaces.model_source import ModelSourceSpec

MODELSCOPE = ModelSourceSpec(
    api="1.0",
    implementation="pegboard_model_source_modelscope.modelscope:ModelScopeSource",
    flags=frozenset({"default"}),
)
"""The source `hub` comes before it by name. It takes org/name where that source is not installed or
is denied."""
