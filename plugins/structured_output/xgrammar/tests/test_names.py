"""`propertyNames`, which the library enforces in objects without `properties`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pegboard_structured_output_xgrammar.backend import XGrammar

from pegboard.interfaces.structured_output import Constraint
from pegboard_testing.contract_structured_output import small_setup


@pytest.mark.parametrize(
    "names", [{"pattern": "^[ab]+$"}, {"type": "string", "enum": ["a", "ba"]}, {"maxLength": 2}]
)
def test_names_are_enforced(names: dict[str, Any]) -> None:
    constraint = Constraint("json", json.dumps({"type": "object", "propertyNames": names}))
    backend = XGrammar(None, small_setup())
    assert backend.reject(constraint) is None
    root = backend.compile(constraint)
    for text, is_valid in (
        ('{"a": 1, "ba": 2}', True),
        ('{"cab": 1}', False),
        ('{"a": 1, "cab": 2}', False),
    ):
        assert (root.fork().accept(list(text.encode())) == len(text)) == is_valid


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"c": {}}, "propertyNames": {"pattern": "^a"}},
        {"type": "object", "propertyNames": {"type": "integer"}},
        {"type": "object", "propertyNames": {"enum": [1]}},
        {"type": "object", "propertyNames": {"format": "date"}},
        {"type": "object", "properties": {"propertyNames": {"minLength": 2}}},
    ],
)
def test_what_is_not_enforced_is_refused(schema: dict[str, Any]) -> None:
    assert XGrammar(None, small_setup()).reject(Constraint("json", json.dumps(schema)))
