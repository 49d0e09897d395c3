"""Build: what a model's constructor gets. Pure values and services; `at()` narrows the path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from pegboard.interfaces.attention import AttentionLayer
    from pegboard.interfaces.collective import Collective
    from pegboard.interfaces.quantization import QuantizationMethod
    from pegboard.layers.layer import Layer


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that share a layer: this rank, how many, and how they talk (None when alone)."""

    rank: int = 0
    size: int = 1
    collective: "Collective | None" = None


@dataclass(frozen=True, slots=True)
class Stage:
    """This rank's slice of consecutive layers; stop None = to the end."""

    is_first: bool = True
    is_last: bool = True
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class LoRALimits:
    """Adapters that may be loaded at once (beside slot 0, the base) and their largest rank."""

    num_slots: int
    max_rank: int


@dataclass(slots=True)
class Declared:
    """What the constructors of one model registered, in order."""

    layers: list["Layer"] = field(default_factory=list)
    attention: dict[int, "AttentionLayer"] = field(default_factory=dict)


@dataclass(frozen=True)
class Build:
    """path: dotted checkpoint path of the module being built ("model.layers.3.self_attn").

    dtype, device: torch names for activations. quantization: how weights are stored; plain: the method for what
    `quantization` leaves alone. kernels: op name → bound callable. rope_style: how the checkpoint orders Q and K rows.
    attention: layer index → its bound attention, filled in by core before `bind`. lora_slots: [T] adapter slot of every
    token of the step, a persistent buffer; None when LoRA is off.
    """

    dtype: str
    device: str
    quantization: "QuantizationMethod"
    plain: "QuantizationMethod"
    kernels: Mapping[str, Callable[..., Any]]
    path: str = ""
    rope_style: str = "halves"
    tensor: Group = Group()
    stage: Stage = Stage()
    lora: LoRALimits | None = None
    lora_slots: "Callable[[], Tensor] | None" = None
    taps: tuple[int, ...] = ()
    declared: Declared = field(default_factory=Declared)
    attention: dict[int, Callable[..., Any]] = field(default_factory=dict)

    def at(self, name: str | int) -> "Build":
        """The same build one module deeper."""
        return replace(self, path=f"{self.path}.{name}" if self.path else str(name))
