"""The tool parser pythonic passes the contract."""

from __future__ import annotations

from pathlib import Path

from pegboard_family_pythonic.tool_parser import PythonicToolParser

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard_testing.contract_output_parser import OutputParserContract
from pegboard_testing.parser_examples import load_examples


class TestPythonic(OutputParserContract):
    examples = load_examples(Path(__file__).with_name("examples.py"))["tool_parser", "pythonic"]

    def parser(self, setup: OutputParserSetup) -> PythonicToolParser:
        return PythonicToolParser(None, setup)


def test_a_string_streams_while_it_comes() -> None:
    parser = PythonicToolParser()
    parser.feed("[write_file(text='a", ())
    assert [getattr(event, "text", None) for event in parser.feed('b"c', ())] == ['b\\"c']
