"""Kind `model_family` (provisional): data about a family of checkpoints. Matched on model type,
architecture and template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pegboard.interfaces.spec import Need, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamilySpec(Spec):
    """Data only: `implementation` is "". The family with the most matches wins. If two have the
    same number, nothing is recommended, and a message says so.

    If model_types or architectures are given, one of them must fit. If file_patterns (fnmatch) are
    given, a file in the checkpoint's folder must fit. Every template marker must occur in the chat
    template. Each of these counts as one match. recommends: {"tokenizer": …, "tool_parser": …,
    "reasoning_parser": …}. chat_template: "package:file" of a Jinja template. It is used if the
    model's own template does not support tools.
    """

    implementation: str = ""
    model_types: frozenset[str] = frozenset()
    architectures: frozenset[str] = frozenset()
    template_markers: tuple[str, ...] = ()
    file_patterns: tuple[str, ...] = ()
    recommends: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamilyNeed(Need):
    """The properties to match. template: Jinja source of the model's own chat template. files:
    names of the files in the checkpoint's folder."""

    model_type: str | None = None
    architectures: frozenset[str] | None = None
    template: str | None = None
    files: frozenset[str] | None = None
