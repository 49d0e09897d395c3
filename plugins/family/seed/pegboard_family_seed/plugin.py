"""Specs of this package."""

from __future__ import annotations

from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.output_parser import OutputParserSpec

SPECIAL = frozenset({"special_tokens"})
TOOL_PARSER = OutputParserSpec(
    api="1.0", implementation="pegboard_family_seed.tool_parser:SeedOssToolParser", flags=SPECIAL
)
REASONING_PARSER = OutputParserSpec(
    api="1.0",
    implementation="pegboard_family_seed.reasoning_parser:SeedOssReasoningParser",
    flags=SPECIAL,
)

SEED_OSS = ModelFamilySpec(
    api="1.0",
    model_types=frozenset({"seed_oss"}),
    recommends={"tool_parser": "seed_oss", "reasoning_parser": "seed_oss"},
)
