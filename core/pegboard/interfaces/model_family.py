"""Kind `model_family` (provisional): data about a family of checkpoints. Matched on model type, architecture and template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pegboard.interfaces.spec import Need, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamilySpec(Spec):
    """Data only: `implementation` is "". Most matches win; a tie recommends nothing and says so.
    recommends: {"tokenizer": …, "tool_parser": …, "reasoning_parser": …}. chat_template: package resource or None."""

    implementation: str = ""
    model_types: frozenset[str] = frozenset()
    architectures: frozenset[str] = frozenset()
    template_markers: tuple[str, ...] = ()
    recommends: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamilyNeed(Need):
    pass
