"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec

LLAMA = ModelSpec(api="1.0", implementation="pegboard_model_llama.llama:LlamaModel")
MIXTRAL = ModelSpec(api="1.0", implementation="pegboard_model_llama.experts:MixtralModel")
QWEN_MOE = ModelSpec(api="1.0", implementation="pegboard_model_llama.experts:QwenMoeModel")
OLMOE = ModelSpec(api="1.0", implementation="pegboard_model_llama.experts:OlmoeModel")
LLAMA4 = ModelSpec(api="1.0", implementation="pegboard_model_llama.llama4:Llama4Model")
