"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec

GEMMA3N = ModelSpec(
    api="1.0",
    implementation="pegboard_model_gemma3n.gemma3n:Gemma3nModel",
    flags=frozenset({"tensor_parallel"}),
)
