"""Spec of the structured output backend `xgrammar`."""

from __future__ import annotations

from pegboard.interfaces.structured_output import StructuredOutputSpec

XGRAMMAR = StructuredOutputSpec(
    api="1.0",
    implementation="pegboard_structured_output_xgrammar.backend:XGrammar",
    suits="pegboard_structured_output_xgrammar.limits:suits",
    tier="tuned",
    supports={
        "constraint": frozenset(
            {"json", "json_object", "regex", "choice", "grammar", "structural_tag"}
        ),
        "compact": True,
        "text": True,
    },
)
