"""AutoRound checkpoints (Cheng et al. 2023): integers in the layout of GPTQ or of AWQ, and small
floats (see `auto_round_floats`).

`extra_config` has other values for some modules: a path or a regular expression for the whole path
→ {"bits": …}. Modules with 16 bits and more are plain. `block_name_to_quantize` names the parts of
the model that are quantized; without it, these are all linear layers but the output head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import EmbeddingLayer, QuantizationSetup
from pegboard_quantization_gptq.auto_round_floats import (
    KINDS,
    MX_GROUP,
    NV_GROUP,
    float_reader,
    float_rounding,
    is_float,
)
from pegboard_quantization_gptq.auto_round_floats import PACKINGS as FLOAT_PACKINGS
from pegboard_quantization_gptq.format import BITS, GPTQReader
from pegboard_weights.asked_rounding import AskedRounding, choose_rounding
from pegboard_weights.awq_layout import AWQReader
from pegboard_weights.config import QuantConfig, matches
from pegboard_weights.grouped import check_whole_groups
from pegboard_weights.small_floats import FloatReader
from pegboard_weights.stored_weight import AnyLayer, FormatMethod, Reader, columns_of

METHOD = "auto-round"
ROTATIONS = ("rotation_config", "spinquant_config")
PACKINGS = ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:auto_awq", "auto_round:awq")


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a config says about modules. bits: 16 = they are plain. floats: the reader of small
    floats; None = they are integers. inputs: how activations are to be rounded."""

    bits: int
    group_size: int = -1
    is_awq: bool = False
    floats: FloatReader | None = None
    inputs: AskedRounding | None = None


class AutoRound(FormatMethod):
    def __init__(self, options: None, setup: QuantizationSetup) -> None:
        super().__init__(setup)
        config = QuantConfig(setup.config, METHOD)
        for name in ROTATIONS:
            if setup.config.get(name):
                raise config.error(
                    name,
                    setup.config[name],
                    "does not support rotations of activations; export the model without them",
                )
        self.blocks = _names(
            config,
            setup.config.get("block_name_to_quantize") or setup.config.get("to_quant_block_names"),
        )
        self.default = self._scheme(config)
        extra = config.part("extra_config")
        parts = {} if extra is None else {name: extra.part(name) for name in extra.values}
        self.extra = {name: self._scheme(part) for name, part in parts.items() if part is not None}
        schemes = (self.default, *self.extra.values())
        asked = [scheme.inputs for scheme in schemes]
        self.roundings = choose_rounding(setup, METHOD, "code_weight", asked)
        if any(scheme.floats and scheme.inputs is None for scheme in schemes):
            config.say_activations_are_not_quantized()

    def _scheme(self, config: QuantConfig) -> Scheme:
        """Values that are missing in extra_config are those of the whole config."""
        stored: Mapping[str, Any] = {**self.setup.config, **config.values}
        merged = QuantConfig(stored, METHOD, config.place)
        bits = stored.get("bits")
        if type(bits) is int and bits >= 16:
            return Scheme(16)
        if is_float(merged):
            merged.one_of("packing_format", FLOAT_PACKINGS, FLOAT_PACKINGS[0])
            reader = float_reader(merged)
            return Scheme(reader.bits, floats=reader, inputs=float_rounding(merged))
        merged.one_of("data_type", ("int", *KINDS), "int")
        default = PACKINGS[2] if "awq" in str(stored.get("backend")) else PACKINGS[0]
        is_awq = "awq" in merged.one_of("packing_format", PACKINGS, default)
        bits = merged.one_of("bits", (4,) if is_awq else BITS)
        return Scheme(bits, merged.size("group_size", 128), is_awq)

    def reader(self, module: str, layer: AnyLayer) -> Reader | None:
        scheme = self._scheme_of(module, layer)
        if scheme is None or scheme.bits >= 16:
            return None
        if scheme.floats is not None:
            size = 1 if scheme.floats.block is None else scheme.floats.block[1]
            if size in (NV_GROUP, MX_GROUP):
                check_whole_groups(module, columns_of(layer), size, METHOD)
            return scheme.floats
        size = scheme.group_size
        if not scheme.is_awq:
            return GPTQReader(scheme.bits, size, zero_offset=1)
        size = columns_of(layer) if size == -1 else size
        check_whole_groups(module, columns_of(layer), size, METHOD)
        return AWQReader(size, has_zeros=True, is_gemv=False)

    def rounding(self, module: str, layer: AnyLayer) -> AskedRounding | None:
        scheme = self._scheme_of(module, layer)
        return scheme.inputs if scheme is not None and scheme.inputs in self.roundings else None

    def _scheme_of(self, module: str, layer: AnyLayer) -> Scheme | None:
        """Return the scheme of a module, None if it is plain."""
        if isinstance(layer, EmbeddingLayer):
            return None
        extra = self._extra(module)
        if extra is None and (not matches(module, self.blocks) if self.blocks else layer.is_head):
            return None
        return self.default if extra is None else extra

    def _extra(self, module: str) -> Scheme | None:
        if module in self.extra:
            return self.extra[module]
        for name, scheme in self.extra.items():
            if not re.fullmatch(r"[\w.]+", name) and _pattern(name).fullmatch(module):
                return scheme
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
