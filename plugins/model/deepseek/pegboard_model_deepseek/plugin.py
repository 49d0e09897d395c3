"""Specs of this package. Where no attention backend stores latents, the fallback serves those that
it can. Keys are chosen by an index on CPUs only."""

from pegboard.interfaces.model import ModelSpec
from pegboard.interfaces.spec import BATCH_INVARIANT

GPUS = ("cuda", "rocm")


def _spec(implementation: str, *others: str) -> ModelSpec:
    """others: the platforms besides CPUs."""
    return ModelSpec(
        api="1.0",
        implementation=implementation,
        platforms=frozenset({"cpu", *others}),
        flags=frozenset({"tensor_parallel", BATCH_INVARIANT}),
    )


DEEPSEEK_V2 = _spec("pegboard_model_deepseek.deepseek:DeepseekV2Model", *GPUS)
DEEPSEEK_V3 = _spec("pegboard_model_deepseek.deepseek:DeepseekV3Model", *GPUS)
MINICPM3 = _spec("pegboard_model_deepseek.minicpm:MiniCPM3Model", *GPUS)
DEEPSEEK_V32 = _spec("pegboard_model_deepseek.deepseek_v32:DeepseekV32Model")
KIMI_LINEAR = _spec("pegboard_model_deepseek.kimi:KimiLinearModel", *GPUS)
LONGCAT_FLASH = _spec("pegboard_model_deepseek.longcat:LongcatFlashModel", *GPUS)
PANGU_ULTRA_MOE = _spec("pegboard_model_deepseek.pangu:PanguUltraMoEModel", *GPUS)
DEEPSEEK_MTP = _spec("pegboard_model_deepseek.prediction:DeepSeekMTP", *GPUS)
OPENPANGU_MTP = _spec("pegboard_model_deepseek.prediction:OpenPanguMTP", *GPUS)
LONGCAT_FLASH_MTP = _spec("pegboard_model_deepseek.prediction:LongCatFlashMTP", *GPUS)
EAGLE_DEEPSEEK = _spec("pegboard_model_deepseek.eagle:EagleDeepSeek", *GPUS)
EAGLE_MISTRAL_LARGE_3 = _spec("pegboard_model_deepseek.eagle:EagleMistralLarge3", *GPUS)
