"""The backend `lm-format-enforcer`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pegboard_structured_output_lm_format_enforcer.backend import LMFormatEnforcer
from pegboard_structured_output_lm_format_enforcer.json_syntax import JsonSyntax

from pegboard.interfaces.structured_output import (
    Constraint,
    StructuredOutput,
    StructuredOutputSetup,
)
from pegboard.interfaces.tokenizer import Vocabulary
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_structured_output import StructuredOutputContract, mask_of


def test_contract() -> None:
    check_entry(installed_entry("structured_output", "lm-format-enforcer"))


class TestLMFormatEnforcer(StructuredOutputContract):
    kinds = ("json", "json_object", "regex", "choice")
    takes = (
        "person",
        "tree",
        "array sizes",
        "boolean",
        "map",
        "string sizes",
        "pattern",
        "optional properties",
    )

    def backend(self, setup: StructuredOutputSetup) -> StructuredOutput:
        return LMFormatEnforcer(None, setup)


def is_json(text: str) -> bool:
    """True if JsonSyntax accepts the text."""
    place: JsonSyntax | None = JsonSyntax()
    for character in text:
        place = place.step(character) if place is not None else None
    return place is not None and place.can_end


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.text(max_size=5)
    | st.floats(0, 100).map(lambda x: round(x, 3)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
)


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_json_is_json(value: object, indent: int | None, is_ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    assert is_json(text)


@given(VALUES, st.data())
def test_what_is_no_json_is_not(value: object, data: st.DataObject) -> None:
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text)))
    broken = (
        text[:at]
        + data.draw(st.sampled_from(list('",:{}[]\\0-.ea\n\x01') + [""]))
        + text[at + data.draw(st.integers(0, 1)) :]
    )
    try:
        json.loads(broken)
    except ValueError:
        assert not is_json(broken)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,}',
        "[1,]",
        "01",
        "1.",
        "-",
        "1e5",
        '"\t"',
        '"\\x"',
        '"\\u12"',
        "nul",
        "{,}",
        "[1 2]",
        "",
    ],
)
def test_broken(text: str) -> None:
    assert not is_json(text)


def test_what_a_mask_allows_is_accepted_however_much_white_space() -> None:
    """The library also counts white space inside strings, but its shortcut for strings does not."""
    token_bytes = [bytes([value]) for value in range(256)] + [
        b"",
        b" " * 5,
        b" " * 11,
        b" " * 15,
        b"a" + b" " * 9,
        b" \n" * 8,
    ]
    vocabulary = Vocabulary(token_bytes, frozenset({256}), (256,))
    backend = LMFormatEnforcer(
        None, StructuredOutputSetup(len(token_bytes), lambda: vocabulary, (256,))
    )
    root = backend.compile(Constraint("json", '{"type": "string"}'))
    for seed in range(20):
        rng = np.random.default_rng(seed)
        state = root.fork()
        assert state.accept([ord('"')]) == 1
        for _ in range(20):
            allowed = np.flatnonzero(mask_of(backend, state, len(token_bytes)))
            allowed = [int(token) for token in allowed if token in (32, 97) or token > 256]
            for token in allowed:
                assert state.fork().accept([token]) == 1, token_bytes[token]
            state.accept([int(rng.choice(allowed))])
