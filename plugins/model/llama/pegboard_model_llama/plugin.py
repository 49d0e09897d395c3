"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec

LLAMA = ModelSpec(api="1.0", implementation="pegboard_model_llama.llama:LlamaModel")
