"""The values that the model reads from a checkpoint's config."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from pegboard.errors import ModelError
from pegboard.layers import read, size_of
from pegboard_models.rope import rope_parameters

TYPES = ("full_attention", "sliding_attention")
BASES = {
    "full_attention": ("rope_theta", 1_000_000.0),
    "sliding_attention": ("rope_local_base_freq", 10_000.0),
}
"""Type of layer → where older configs have the base of its rotary embedding, and the default."""


class Shape:
    """The sizes from a checkpoint's config, under uniform names. Lists have one value for each
    layer.

    num_streams: vectors of hidden_size that a token has between layers. active: the one that
    attention and feed-forward blocks compute. layer_size: channels of the input that a token has at
    each layer. cutoffs: standard deviations above the mean below which gates are closed; None =
    they are not. sources: the layer whose keys and values a layer reads; None = its own.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.hidden_size = size_of(config, "hidden_size")
        self.vocab_size = size_of(config, "vocab_size")
        self.num_layers = size_of(config, "num_hidden_layers")
        self.num_heads = size_of(config, "num_attention_heads")
        self.num_kv_heads = read(config, "num_key_value_heads", int) or self.num_heads
        self.head_dim = read(config, "head_dim", int) or 256
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} heads of keys "
                "equally"
            )
        self.max_positions = read(config, "max_position_embeddings", int) or 32768
        self.eps = read(config, "rms_norm_eps", float) or 1e-6
        self.activation = read(config, "hidden_activation", str) or "gelu_pytorch_tanh"
        self.bias = bool(read(config, "attention_bias", bool))
        self.is_tied = read(config, "tie_word_embeddings", bool) is not False
        self.logits_cap = (
            read(config, "final_logit_softcapping", float)
            if "final_logit_softcapping" in config
            else 30.0
        )
        self.num_streams = read(config, "altup_num_inputs", int) or 4
        self.active = read(config, "altup_active_idx", int) or 0
        self.scales_correction = read(config, "altup_correct_scale", bool) is not False
        if not 0 <= self.active < self.num_streams:
            raise ModelError(
                f"altup_active_idx={self.active} is not one of "
                f"altup_num_inputs={self.num_streams} streams"
            )
        self.laurel_rank = read(config, "laurel_rank", int) or 64
        self.layer_size = read(config, "hidden_size_per_layer_input", int) or 256
        self.layer_vocab_size = read(config, "vocab_size_per_layer_input", int) or self.vocab_size
        self.widths = [
            self._positive("intermediate_size", each)
            for each in self._each(config, "intermediate_size", None)
        ]
        self.cutoffs = [
            self._cutoff(each) for each in self._each(config, "activation_sparsity_pattern", 0.0)
        ]
        default = [
            "full_attention" if (i + 1) % 5 == 0 else "sliding_attention"
            for i in range(self.num_layers)
        ]
        self.types = read(config, "layer_types", list[str]) or default
        if len(self.types) != self.num_layers or not set(self.types) <= set(TYPES):
            raise ModelError(
                f"layer_types is {self.types}; expected {' or '.join(TYPES)} for each of "
                f"{self.num_layers} layers"
            )
        self.window = read(config, "sliding_window", int) or 512
        self.sources = self._sources(
            15 if (given := read(config, "num_kv_shared_layers", int)) is None else given
        )

    def _each(self, config: Mapping[str, Any], name: str, default: float | None) -> list[Any]:
        value = config.get(name, default)
        values = (
            value
            if isinstance(value, list)
            else [default if value is None else value] * self.num_layers
        )
        if len(values) != self.num_layers:
            raise ModelError(f"{name} has {len(values)} entries for {self.num_layers} layers")
        return values

    @staticmethod
    def _positive(name: str, value: Any) -> int:
        return size_of({name: value}, name)

    @staticmethod
    def _cutoff(share: Any) -> float | None:
        number = (
            read({"activation_sparsity_pattern": share}, "activation_sparsity_pattern", float)
            or 0.0
        )
        if not 0 <= number < 1:
            raise ModelError(
                f"activation_sparsity_pattern has the entry {share}; expected a share of at least "
                "0 and below 1"
            )
        return NormalDist().inv_cdf(number) if number else None

    def _sources(self, num_shared: int) -> list[int | None]:
        first = self.num_layers - num_shared
        if num_shared and not 0 < first < self.num_layers:
            raise ModelError(
                f"num_kv_shared_layers={num_shared} leaves no layer of {self.num_layers} with "
                "keys and values of its own"
            )
        sources: list[int | None] = [None] * self.num_layers
        for index in range(first, self.num_layers):
            sources[index] = max(
                (i for i in range(first) if self.types[i] == self.types[index]), default=None
            )
            if sources[index] is None:
                raise ModelError(
                    f"layer {index} shares the keys and values of {self.types[index]}, but no "
                    "layer has its own"
                )
        return sources


def rope_of(config: Mapping[str, Any], kind: str) -> tuple[float, Mapping[str, Any]]:
    """Return (base, scaling) of the rotary embedding of a type of layer."""
    given = config.get("rope_parameters")
    if isinstance(given, Mapping) and isinstance(given.get(kind), Mapping):
        return rope_parameters({"rope_parameters": given[kind]})
    name, default = BASES[kind]
    base = read(config, name, float) or default
    return rope_parameters({**(config if kind == "full_attention" else {}), "rope_theta": base})
