"""The spec of the model `GPTNeoForCausalLM`. It imports nothing heavy."""

from __future__ import annotations

from pegboard.interfaces.model import ModelSpec

GPT_NEO = ModelSpec(
    api="1.0",
    implementation="pegboard_model_gpt_neo.model:GPTNeo",
)
