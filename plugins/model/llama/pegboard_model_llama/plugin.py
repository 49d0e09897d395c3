"""Specs of this package."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.spec import BATCH_INVARIANT


def _spec(place: str) -> ModelSpec:
    return ModelSpec(
        api="1.0",
        implementation=f"pegboard_model_llama.{place}",
        flags=frozenset({"tensor_parallel", BATCH_INVARIANT}),
    )


LLAMA = _spec("llama:LlamaModel")
MINISTRAL3 = _spec("ministral:Ministral3Model")
QWEN2 = _spec("llama:Qwen2Model")
QWEN3 = _spec("llama:Qwen3Model")
MIXTRAL = _spec("experts:MixtralModel")
QWEN2_MOE = _spec("experts:Qwen2MoeModel")
QWEN3_MOE = _spec("experts:Qwen3MoeModel")
OLMOE = _spec("experts:OlmoeModel")
ARIA_TEXT = _spec("experts:AriaTextModel")
LLAMA4 = _spec("llama4:Llama4Model")
EAGLE_LLAMA4 = _spec("eagle:EagleLlama4")
