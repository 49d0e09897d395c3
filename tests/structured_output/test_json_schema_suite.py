"""The JSON Schema Test Suite with every backend: a backend enforces every schema that it accepts.
Opt-in, because the suite is not ours:

    PEGBOARD_TEST_JSON_SCHEMA_SUITE   directory of the suite
    (https://github.com/json-schema-org/JSON-Schema-Test-Suite)

A text that a schema forbids must not be possible. Most texts that it allows must be possible: a
backend may be narrower than a schema, require properties in the order of the schema, or allow only
those that are named.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard.interfaces.structured_output import (
    Constraint,
    StructuredOutput,
    StructuredOutputSetup,
)
from pegboard.plugins.registry import Registry
from pegboard_testing.contract_structured_output import compile_or_none, mask_of, small_setup

SUITE = os.environ.get("PEGBOARD_TEST_JSON_SCHEMA_SUITE")
FOLDER = Path(SUITE or ".") / "tests" / "draft2020-12"
BACKENDS = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")
REMOTE = "localhost:1234"
"""Schemas that refer to other documents."""

needs_suite = pytest.mark.skipif(SUITE is None, reason="set PEGBOARD_TEST_JSON_SCHEMA_SUITE")


def groups() -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """Yields (name, schema, tests) of the whole suite, without those that need other documents."""
    for path in sorted(FOLDER.glob("*.json")):
        for group in json.loads(path.read_text("utf-8")):
            if REMOTE not in json.dumps(group["schema"]):
                yield f"{path.stem}: {group['description']}", group["schema"], group["tests"]


def spellings(value: Any) -> list[str]:
    """Returns the ways in which models may write a JSON text."""
    return [
        json.dumps(value, ensure_ascii=False),
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
    ]


@needs_suite
@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_taken_is_enforced(
    registry_and_setup: tuple[Registry, StructuredOutputSetup], name: str
) -> None:
    registry = registry_and_setup[0]
    setup = small_setup()
    backend: StructuredOutput = registry.build(registry.find("structured_output", name), setup)
    (stop,) = setup.stop_token_ids
    wrong: list[str] = []
    num_taken = num_forbidden = 0
    allowed: list[bool] = []
    for title, schema, tests in groups():
        grammar = compile_or_none(backend, Constraint("json", json.dumps(schema)))
        if grammar is None:
            continue

        def accepts(text: str) -> bool:
            state = grammar.fork()  # noqa: B023  called in this turn of the loop only
            data = list(text.encode())
            return state.accept(data) == len(data) and bool(
                mask_of(backend, state, setup.vocab_size)[stop]
            )

        num_taken += 1
        for test in tests:
            is_possible = any(accepts(text) for text in spellings(test["data"]))
            if test["valid"]:
                allowed.append(is_possible)
                continue
            num_forbidden += 1
            if is_possible:
                wrong.append(
                    f"{title}: {test['description']}: {json.dumps(test['data'])} is possible"
                )
    counts = (
        f"{sum(allowed)} of {len(allowed)} allowed texts and {len(wrong)} of {num_forbidden} "
        "forbidden ones are possible"
    )
    print(f"{name} takes {num_taken} schemas; {counts}")
    assert not wrong, "\n".join(wrong)
    assert num_taken > 20 and sum(allowed) > len(allowed) / 2
