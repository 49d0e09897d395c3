"""Every output parser of this repository has examples, because the contract tests run on them."""

from __future__ import annotations

from importlib.metadata import entry_points

from members import ROOT

from pegboard_testing.parser_examples import load_examples


def test_every_parser_has_examples() -> None:
    known = {
        key for file in ROOT.glob("plugins/*/*/tests/examples.py") for key in load_examples(file)
    }
    installed = {
        (kind, entry.name)
        for kind in ("tool_parser", "reasoning_parser")
        for entry in entry_points(group=f"pegboard.{kind}.v1")
        if entry.module.startswith("pegboard_family_")
    }
    assert installed and installed == known
