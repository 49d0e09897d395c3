"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.model import ModelSpec

TRANSFORMERS = ModelSpec(
    api="1.0",
    implementation="pegboard_model_transformers.model:TransformersModel",
    tier="reference",
    flags=frozenset({"tensor_parallel"}),
)
