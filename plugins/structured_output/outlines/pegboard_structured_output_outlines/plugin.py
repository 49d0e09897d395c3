"""Spec of the structured output backend `outlines`."""

from __future__ import annotations

from pegboard.interfaces.structured_output import StructuredOutputSpec

OUTLINES = StructuredOutputSpec(
    api="1.0",
    implementation="pegboard_structured_output_outlines.backend:Outlines",
    suits="pegboard_structured_output_outlines.pattern:suits",
    supports={"constraint": frozenset({"json", "regex", "choice"}), "text": True},
)
