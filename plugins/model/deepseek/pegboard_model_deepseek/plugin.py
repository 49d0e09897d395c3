"""Specs of this package. Where no attention backend stores latents, the fallback serves those that
it can. Keys are chosen by an index on CPUs only."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.spec import BATCH_INVARIANT


def _spec(implementation: str) -> ModelSpec:
    return ModelSpec(
        api="1.0",
        implementation=implementation,
        platforms=frozenset({"cpu", "cuda", "rocm"}),
        flags=frozenset({"tensor_parallel", BATCH_INVARIANT}),
    )


DEEPSEEK_V2 = _spec("pegboard_model_deepseek.deepseek:DeepseekV2Model")
DEEPSEEK_V3 = _spec("pegboard_model_deepseek.deepseek:DeepseekV3Model")
MINICPM3 = _spec("pegboard_model_deepseek.minicpm:MiniCPM3Model")
DEEPSEEK_V32 = _spec("pegboard_model_deepseek.deepseek_v32:DeepseekV32Model")
KIMI_LINEAR = _spec("pegboard_model_deepseek.kimi:KimiLinearModel")
LONGCAT_FLASH = _spec("pegboard_model_deepseek.longcat:LongcatFlashModel")
MISTRAL_LARGE_3 = _spec("pegboard_model_deepseek.mistral:MistralLarge3Model")
PANGU_ULTRA_MOE = _spec("pegboard_model_deepseek.pangu:PanguUltraMoEModel")
DEEPSEEK_MTP = _spec("pegboard_model_deepseek.prediction:DeepSeekMTP")
OPENPANGU_MTP = _spec("pegboard_model_deepseek.prediction:OpenPanguMTP")
LONGCAT_FLASH_MTP = _spec("pegboard_model_deepseek.prediction:LongCatFlashMTP")
EAGLE_DEEPSEEK = _spec("pegboard_model_deepseek.eagle:EagleDeepSeek")
EAGLE_MISTRAL_LARGE_3 = _spec("pegboard_model_deepseek.eagle:EagleMistralLarge3")
