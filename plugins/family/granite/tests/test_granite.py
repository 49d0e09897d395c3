"""The parsers of Granite, apart from their contract."""

from __future__ import annotations

from pegboard_family_granite.reasoning_parser import GraniteReasoningParser

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard_testing.contract_output_parser import VOCABULARY


def test_a_grammar_waits_for_the_response_only_when_the_model_thinks() -> None:
    assert GraniteReasoningParser(None, OutputParserSetup(VOCABULARY)).reasoning_end() == ()
    thinking = OutputParserSetup(VOCABULARY, template_kwargs={"thinking": True})
    assert "Here is my response:" in GraniteReasoningParser(None, thinking).reasoning_end()
