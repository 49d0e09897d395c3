"""AutoRound checkpoints (Cheng et al. 2023), in the layout of GPTQ or of AWQ.

`extra_config` has other values for some modules: a path or a regular expression for the whole path
→ {"bits": …}. Modules with 16 bits and more are plain. `block_name_to_quantize` names the parts of
the model that are quantized; without it, these are all linear layers but the output head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, QuantizationSetup
from pegboard_quantization_gptq.format import BITS, GPTQReader
from pegboard_weights.awq_layout import AWQReader
from pegboard_weights.config import QuantConfig, matches
from pegboard_weights.grouped import check_whole_groups
from pegboard_weights.stored_weight import AnyLayer, FormatMethod, Reader, columns_of

METHOD = "auto-round"
PACKINGS = ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:auto_awq", "auto_round:awq")


class AutoRound(FormatMethod):
    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(setup)
        config = QuantConfig(setup.config, METHOD)
        config.one_of("data_type", ("int",), "int")
        default = PACKINGS[2] if "awq" in str(setup.config.get("backend")) else PACKINGS[0]
        self.is_awq = "awq" in config.one_of("packing_format", PACKINGS, default)
        self.blocks = _names(
            config,
            setup.config.get("block_name_to_quantize") or setup.config.get("to_quant_block_names"),
        )
        extra = config.part("extra_config")
        self.extra = {} if extra is None else {name: extra.part(name) for name in extra.values}
        self.bits, self.group_size = self._values(config)
        for values in self.extra.values():  # mistakes are reported before anything is loaded
            if values is not None:
                self._values(values)

    def _values(self, config: QuantConfig) -> tuple[int, int]:
        """Return bits (16: plain) and group size. Values that are missing in extra_config are those
        of the whole config."""
        stored: Mapping[str, Any] = {**self.setup.config, **config.values}
        merged = QuantConfig(stored, METHOD, config.place)
        bits = stored.get("bits")
        if type(bits) is int and bits >= 16:
            return 16, -1
        return merged.one_of("bits", (4,) if self.is_awq else BITS), merged.size("group_size", 128)

    def reader(self, module: str, layer: AnyLayer) -> Reader | None:
        if isinstance(layer, EmbeddingLayer):
            return None
        extra = self._extra(module)
        if extra is None and (not matches(module, self.blocks) if self.blocks else layer.is_head):
            return None
        bits, size = (self.bits, self.group_size) if extra is None else self._values(extra)
        if bits >= 16:
            return None
        if not self.is_awq:
            return GPTQReader(bits, size, zero_offset=1)
        size = columns_of(layer) if size == -1 else size
        check_whole_groups(module, columns_of(layer), size, METHOD)
        return AWQReader(size, has_zeros=True, is_gemv=False)

    def _extra(self, module: str) -> QuantConfig | None:
        if module in self.extra:
            return self.extra[module]
        for name, values in self.extra.items():
            if not re.fullmatch(r"[\w.]+", name) and _pattern(name).fullmatch(module):
                return values
        return None


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ModelError(
            f"the checkpoint's quantization_config has the pattern {text!r} in extra_config: "
            f"{error}"
        ) from error


def _names(config: QuantConfig, stored: object) -> list[str]:
    """Return the names in a text with commas, or in lists of texts, which may be nested."""

    def flat(value: object) -> Iterator[str]:
        if isinstance(value, str):
            yield from (name.strip() for name in value.split(",") if name.strip())
        elif isinstance(value, list | tuple):
            for item in value:
                yield from flat(item)
        elif value is not None:
            raise config.error("block_name_to_quantize", stored, "needs texts")

    return list(flat(stored))
