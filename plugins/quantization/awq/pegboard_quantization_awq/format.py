"""AWQ checkpoints (Lin et al. 2023). See `pegboard_weights.awq_layout` for the tensors."""

from __future__ import annotations

from pegboard.interfaces.quantization import EmbeddingLayer, QuantizationSetup
from pegboard_weights.awq_layout import AWQReader
from pegboard_weights.config import QuantConfig, matches
from pegboard_weights.grouped import check_whole_groups
from pegboard_weights.stored_weight import AnyLayer, FormatMethod


class AWQ(FormatMethod):
    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(setup)
        config = QuantConfig(setup.config, "AWQ")
        config.one_of(("bits", "w_bit"), (4,), 4)
        self.group_size = config.size(("group_size", "q_group_size"), 128)
        self.has_zeros = config.flag("zero_point", True)
        self.version = str(config.one_of("version", ("gemm", "gemv", "GEMM", "GEMV"), "gemm")).lower()
        self.excluded = config.names("modules_to_not_convert")

    def reader(self, module: str, layer: AnyLayer) -> AWQReader | None:
        if isinstance(layer, EmbeddingLayer) or layer.is_head or matches(module, self.excluded):
            return None
        group_size = layer.in_features if self.group_size == -1 else self.group_size
        check_whole_groups(module, layer.in_features, group_size, "AWQ")
        return AWQReader(group_size, self.has_zeros, is_gemv=self.version == "gemv")
