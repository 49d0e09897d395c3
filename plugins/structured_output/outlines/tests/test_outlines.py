"""The backend `outlines`."""

from __future__ import annotations

from pegboard_structured_output_outlines.backend import Outlines

from pegboard.interfaces.structured_output import StructuredOutput, StructuredOutputSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_structured_output import StructuredOutputContract


def test_contract() -> None:
    check_entry(installed_entry("structured_output", "outlines"))


class TestOutlines(StructuredOutputContract):
    kinds = ("json", "regex", "choice")
    takes = (
        "person",
        "array sizes",
        "enum",
        "boolean",
        "map",
        "string sizes",
        "pattern",
        "optional properties",
        "uuid",
    )

    def backend(self, setup: StructuredOutputSetup) -> StructuredOutput:
        return Outlines(None, setup)
