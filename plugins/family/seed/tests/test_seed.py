"""The parsers of Seed-OSS pass the contract."""

from __future__ import annotations

from pathlib import Path

from pegboard_family_seed.reasoning_parser import SeedOssReasoningParser
from pegboard_family_seed.tool_parser import SeedOssToolParser

from pegboard.interfaces.output_parser import OutputParserSetup
from pegboard_testing.contract_output_parser import OutputParserContract
from pegboard_testing.parser_examples import load_examples

EXAMPLES = load_examples(Path(__file__).with_name("examples.py"))


class TestSeedOss(OutputParserContract):
    examples = EXAMPLES["tool_parser", "seed_oss"]

    def parser(self, setup: OutputParserSetup) -> SeedOssToolParser:
        return SeedOssToolParser(None, setup)


class TestSeedOssReasoning(OutputParserContract):
    examples = EXAMPLES["reasoning_parser", "seed_oss"]
    plain_is_reasoning = True

    def parser(self, setup: OutputParserSetup) -> SeedOssReasoningParser:
        return SeedOssReasoningParser(None, setup)
