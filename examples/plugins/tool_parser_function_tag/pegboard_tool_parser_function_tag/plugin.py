"""The spec. It imports nothing heavy."""

from __future__ import annotations

from pegboard.interfaces.output_parser import OutputParserSpec

FUNCTION_TAG = OutputParserSpec(
    api="1.0",
    implementation="pegboard_tool_parser_function_tag.parser:FunctionTagToolParser",
)
