"""Spec of the structured output backend `guidance`."""

from __future__ import annotations

from pegboard.interfaces.structured_output import StructuredOutputSpec

GUIDANCE = StructuredOutputSpec(
    api="1.0",
    implementation="pegboard_structured_output_llguidance.backend:Guidance",
    suits="pegboard_structured_output_llguidance.grammar:suits",
    supports={
        "constraint": frozenset(
            {"json", "json_object", "regex", "choice", "grammar", "structural_tag"}
        ),
        "compact": True,
        "text": True,
    },
)
