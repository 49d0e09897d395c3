"""200 texts per backend, drawn from random logits over the real vocabulary at temperature 1: all
satisfy their constraint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pegboard.interfaces.structured_output import (
    Constraint,
    StructuredOutput,
    StructuredOutputSetup,
)
from pegboard.plugins.registry import Registry
from pegboard_testing import structured_output_cases as cases
from pegboard_testing.contract_structured_output import draw, json_judge

BACKENDS = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")
NUM_SAMPLES = 200

ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        "state": {"enum": ["open", "paid", "sent"]},
        "lines": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 12},
                    "count": {"type": "integer"},
                },
                "required": ["name", "count"],
            },
        },
        "note": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["id", "state", "lines", "note"],
    "additionalProperties": False,
}
REGEX = r"[A-Z][a-z]{2,8}( [A-Z][a-z]{2,8})?, \d{1,2}\.\d{1,2}\.(19|20)\d{2}"
CHOICES = ["positive", "negative", "neutral", "very positive"]
GRAMMAR = """
root ::= "SELECT " columns " FROM " name (" WHERE " name " = " number)?
columns ::= "*" | name (", " name)*
name ::= "users" | "orders" | "items"
number ::= [0-9]+
"""
SELECT = re.compile(
    r"SELECT (\*|(users|orders|items)(, (users|orders|items))*) FROM (users|orders|items)( WHERE "
    r"(users|orders|items) = [0-9]+)?"
)

CONSTRAINTS: dict[str, tuple[Constraint, Callable[[str], bool]]] = {
    "json": (Constraint("json", json.dumps(ORDER)), json_judge(ORDER)),
    "person": (Constraint("json", json.dumps(cases.PERSON)), json_judge(cases.PERSON)),
    "regex": (Constraint("regex", REGEX), lambda text: bool(re.fullmatch(REGEX, text))),
    "choice": (Constraint("choice", json.dumps(CHOICES)), CHOICES.__contains__),
    "grammar": (Constraint("grammar", GRAMMAR), lambda text: bool(SELECT.fullmatch(text))),
}


@pytest.fixture(params=BACKENDS)
def backend(
    request: pytest.FixtureRequest, registry_and_setup: tuple[Registry, StructuredOutputSetup]
) -> StructuredOutput:
    registry, setup = registry_and_setup
    made: StructuredOutput = registry.build(
        registry.find("structured_output", request.param), setup
    )
    return made


@pytest.mark.slow
def test_all_samples_obey(backend: StructuredOutput, setup_: StructuredOutputSetup) -> None:
    taken = {name: pair for name, pair in CONSTRAINTS.items() if backend.reject(pair[0]) is None}
    assert {"json", "person", "regex", "choice"} <= set(taken)
    rng = np.random.default_rng(7)
    num_complete = 0
    for constraint, judge in taken.values():
        root = backend.compile(constraint)
        for _ in range(-(-NUM_SAMPLES // len(taken))):
            text = draw(backend, root.fork(), setup_, rng)
            if text is not None:
                num_complete += 1
                assert judge(text.decode("utf-8", "replace")), f"{constraint}: {text!r}"
    assert num_complete >= NUM_SAMPLES


def test_masks_agree_where_constraints_are_simple(
    registry_and_setup: tuple[Registry, StructuredOutputSetup],
) -> None:
    """Four implementations give the same answer: at every place of a walk they allow the same
    tokens, except tokens with parts of characters, which one backend never allows."""
    registry, setup = registry_and_setup
    backends = [
        registry.build(registry.find("structured_output", name), setup) for name in BACKENDS
    ]
    rng = np.random.default_rng(3)
    for constraint in (
        Constraint("choice", json.dumps(CHOICES)),
        Constraint("regex", r"[a-f]{2,9}[0-9]?"),
    ):
        grammars = [backend.compile(constraint).fork() for backend in backends]
        for _ in range(6):
            bits = np.zeros((len(backends), -(-setup.vocab_size // 32)), np.uint32)
            for i, (backend, grammar) in enumerate(zip(backends, grammars, strict=True)):
                backend.fill([grammar], bits[i : i + 1])
            masks = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[
                :, : setup.vocab_size
            ]
            for name, mask in zip(BACKENDS, masks, strict=True):
                assert (mask == masks[0]).all(), (
                    name,
                    [setup.vocabulary.token_bytes[t] for t in np.flatnonzero(mask ^ masks[0])],
                )
            masks[0][list(setup.stop_token_ids)] = 0
            allowed = np.flatnonzero(masks[0])
            if not len(allowed):
                break
            token = int(rng.choice(allowed))
            assert [grammar.accept([token]) for grammar in grammars] == [1] * len(grammars)
