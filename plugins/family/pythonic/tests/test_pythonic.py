"""The tool parser pythonic, apart from its contract."""

from __future__ import annotations

from pegboard_family_pythonic.tool_parser import PythonicToolParser


def test_a_string_streams_while_it_comes() -> None:
    parser = PythonicToolParser()
    parser.feed("[write_file(text='a", ())
    assert [getattr(event, "text", None) for event in parser.feed('b"c', ())] == ['b\\"c']
