"""Specs of this package. On other platforms no attention backend stores latents yet, so the
fallback serves those that it can."""

from pegboard.interfaces.model import ModelSpec


def _on_cpu(implementation: str) -> ModelSpec:
    return ModelSpec(
        api="1.0",
        implementation=implementation,
        platforms=frozenset({"cpu"}),
        flags=frozenset({"tensor_parallel"}),
    )


DEEPSEEK_V2 = _on_cpu("pegboard_model_deepseek.deepseek:DeepseekV2Model")
DEEPSEEK_V3 = _on_cpu("pegboard_model_deepseek.deepseek:DeepseekV3Model")
MINICPM3 = _on_cpu("pegboard_model_deepseek.minicpm:MiniCPM3Model")
DEEPSEEK_V32 = _on_cpu("pegboard_model_deepseek.deepseek_v32:DeepseekV32Model")
KIMI_LINEAR = _on_cpu("pegboard_model_deepseek.kimi:KimiLinearModel")
LONGCAT_FLASH = _on_cpu("pegboard_model_deepseek.longcat:LongcatFlashModel")
PANGU_ULTRA_MOE = _on_cpu("pegboard_model_deepseek.pangu:PanguUltraMoEModel")
DEEPSEEK_MTP = _on_cpu("pegboard_model_deepseek.prediction:DeepSeekMTP")
OPENPANGU_MTP = _on_cpu("pegboard_model_deepseek.prediction:OpenPanguMTP")
LONGCAT_FLASH_MTP = _on_cpu("pegboard_model_deepseek.prediction:LongCatFlashMTP")
EAGLE_DEEPSEEK = _on_cpu("pegboard_model_deepseek.eagle:EagleDeepSeek")
