"""What plugins of vLLM register in this process, as plugins of Pegboard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pegboard_vllm_compat.bridge import Adapted
from pegboard_vllm_compat.parser_interface import (
    ReasoningParser,
    ReasoningParsers,
    ToolParser,
    ToolParsers,
)
from pegboard_vllm_compat.resolver_interface import LoRAResolverRegistry

REGISTRIES: Mapping[str, dict[str, Any]] = {
    "tool_parser": ToolParsers.parsers,
    "reasoning_parser": ReasoningParsers.parsers,
    "lora_resolver": LoRAResolverRegistry.resolvers,
}
"""Kind → what is registered, by name."""


def registered_by(target: str, run: Callable[[], Any], base_model: str = "") -> list[Adapted]:
    """Return what a file or a function registers. target: how other processes find it. run: runs
    it here. base_model: what LoRA resolvers are told."""
    before = {kind: dict(values) for kind, values in REGISTRIES.items()}
    for values in REGISTRIES.values():
        values.clear()
    try:
        run()
        return [
            Adapted(kind, name, target, _reads_special(kind, name), base_model)
            for kind, values in REGISTRIES.items()
            for name in values
        ]
    finally:
        for kind, values in REGISTRIES.items():
            values.update({**before[kind], **values})


def _reads_special(kind: str, name: str) -> bool:
    """Return whether a parser wants special tokens in its text. vLLM's parsers say so in
    `adjust_request`."""
    if kind == "tool_parser":
        return ToolParsers.parser(name).adjust_request is not ToolParser.adjust_request
    if kind == "reasoning_parser":
        parser = ReasoningParsers.parser(name)
        base = getattr(ReasoningParser, "adjust_request", None)
        return getattr(parser, "adjust_request", None) is not base
    return False
