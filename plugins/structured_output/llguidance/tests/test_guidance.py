"""The backend `guidance`."""

from __future__ import annotations

from pegboard_structured_output_llguidance.backend import Guidance

from pegboard.interfaces.structured_output import StructuredOutput, StructuredOutputSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_structured_output import StructuredOutputContract


def test_contract() -> None:
    check_entry(installed_entry("structured_output", "guidance"))


class TestGuidance(StructuredOutputContract):
    def backend(self, setup: StructuredOutputSetup) -> StructuredOutput:
        return Guidance(None, setup)
