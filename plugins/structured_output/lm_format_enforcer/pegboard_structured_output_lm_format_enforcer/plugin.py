"""Spec of the structured output backend `lm-format-enforcer`."""

from __future__ import annotations

from pegboard.interfaces.structured_output import StructuredOutputSpec

LM_FORMAT_ENFORCER = StructuredOutputSpec(
    api="1.0",
    implementation="pegboard_structured_output_lm_format_enforcer.backend:LMFormatEnforcer",
    suits="pegboard_structured_output_lm_format_enforcer.limits:suits",
    tier="reference",
    supports={"constraint": frozenset({"json", "json_object", "regex", "choice"}), "text": True},
)
