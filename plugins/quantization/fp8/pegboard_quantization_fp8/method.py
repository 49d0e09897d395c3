"""Checkpoints in float8, and plain checkpoints that become float8 while they are loaded.

    weight         float8_e4m3fn (or another float8 type) [out, in]
    weight_scale   [], [1]: of the tensor, or [out], [out, 1]: of each row
    weight_scale_inv   instead of weight_scale: [out / 128, in / 128], both rounded up, if the
    config has weight_block_size
                   [128, 128]. It is multiplied, in spite of its name.
    input_scale    [], [1]: of the activations, if activation_scheme is "static"

W = weight · scale. Activations are to be rounded to e4m3: with a scale per token, per token and 128
columns if the weights have blocks, or the stored one. `activation_scale_ub` has no effect.
"""

from __future__ import annotations

from pegboard.errors import ConfigError
from pegboard.interfaces.quantization import EmbeddingLayer, QuantizationSetup
from pegboard_quantization_fp8.online import RowReader
from pegboard_weights.asked_rounding import AskedRounding, choose_rounding
from pegboard_weights.config import QuantConfig, matches
from pegboard_weights.small_floats import FloatReader
from pegboard_weights.stored_weight import AnyLayer, FormatMethod, Reader

METHODS = ("fp8", "ptpc_fp8", "fbgemm_fp8", "fp8_per_channel")


class FP8(FormatMethod):
    """Embeddings and the output head are plain."""

    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(setup)
        config = QuantConfig(setup.config, "FP8")
        stored = setup.config.get("quant_method")
        if setup.config and stored not in METHODS:
            raise ConfigError(
                f"the checkpoint is already quantized ({stored!r}), but FP8 needs plain weights "
                "or float8. Leave out --quantization to use the checkpoint as it is"
            )
        config.one_of("fmt", ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"), "e4m3")
        scheme = config.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
        self.excluded = (*config.names("modules_to_not_convert"), *config.names("ignored_layers"))
        self.stored: Reader = RowReader()
        self.asked: AskedRounding | None = None
        if setup.config:
            block = config.block("weight_block_size")
            names = (
                ("weight_scale", "weight_scale_inv")
                if block is None
                else ("weight_scale_inv", "weight_scale")
            )
            self.stored = FloatReader(block=block, scale=names)
            group = 0 if block is None or block[1] % 32 else block[1]
            asked = AskedRounding("float8_e4m3fn", group, is_static=scheme == "static")
            chosen = choose_rounding(setup, "FP8", "code_weight", [asked])
            self.asked = next(iter(chosen), None)

    def rounding(self, module: str, layer: AnyLayer) -> AskedRounding | None:
        return self.asked

    def reader(self, module: str, layer: AnyLayer) -> Reader | None:
        if isinstance(layer, EmbeddingLayer) or layer.is_head or matches(module, self.excluded):
            return None
        return self.stored
