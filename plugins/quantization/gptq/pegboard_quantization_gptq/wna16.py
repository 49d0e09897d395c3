"""Names of vLLM's kernels that take checkpoints of GPTQ and of AWQ (`moe_wna16`, `ipex`)."""

from __future__ import annotations

from pegboard.interfaces.quantization import QuantizationSetup
from pegboard_quantization_gptq.format import GPTQ
from pegboard_weights.awq_layout import AWQ
from pegboard_weights.stored_weight import FormatMethod


def wna16(options: None, setup: QuantizationSetup) -> FormatMethod:
    """Return the method for the checkpoint's `quant_method`: AWQ, else GPTQ."""
    return (AWQ if setup.config.get("quant_method") == "awq" else GPTQ)(options, setup)
