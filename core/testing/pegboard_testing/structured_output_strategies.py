"""Random constraints for the contract tests of the kind `structured_output`: schemas, regular
expressions and grammars, many of them contradictory or not well formed."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NUMBERS = st.integers(-3, 5) | st.sampled_from(
    [0.5, -1.5, 2**31, 2**53 + 1, 10**300, 1e308, "1", None, True]
)
COUNTS = st.integers(-1, 6) | st.sampled_from([200, 10**9, 2**63, 1.0, "2", None, False])
NAMES = st.sampled_from(["a", "b", "", 'q"', "\\", "é", "$ref", "a/b"])
TYPES = st.sampled_from(
    ["string", "number", "integer", "boolean", "null", "array", "object", "odd"]
)
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from(["", "a", 'q"', "\n", [], {}, [1], 1.5, 10**30])
)


def schemas() -> st.SearchStrategy[Any]:
    """Schemas with up to a few levels; each keyword may have a value that does not fit it, or
    contradicts another one."""
    return st.recursive(_one(st.just({})), _one, max_leaves=5)


def _one(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    counts = dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), COUNTS
    )
    numbers = dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), NUMBERS
    )
    some = {
        "pattern": regexes(),
        "format": st.sampled_from(["date", "uuid", "odd", 3]),
        "enum": st.lists(VALUES, max_size=3) | VALUES,
        "const": VALUES,
        "items": inner | st.booleans(),
        "prefixItems": st.lists(inner, max_size=2),
        "properties": st.dictionaries(NAMES, inner, max_size=3) | VALUES,
        "patternProperties": st.dictionaries(regexes(), inner, max_size=2),
        "additionalProperties": inner | st.booleans(),
        "propertyNames": inner,
        "required": st.lists(NAMES, max_size=2) | VALUES,
        "anyOf": st.lists(inner, max_size=3),
        "oneOf": st.lists(inner, max_size=3),
        "allOf": st.lists(inner, max_size=2),
        "not": inner,
        "$ref": st.sampled_from(["#", "#/properties/a", "#/missing", "odd", 3]),
    }
    plain = st.fixed_dictionaries(
        {"type": TYPES | st.lists(TYPES, max_size=3)}, optional={**counts, **numbers}
    )
    return plain | st.fixed_dictionaries({}, optional={"type": TYPES, **some})


def regexes() -> st.SearchStrategy[str]:
    """Patterns of a few pieces, most of them well formed."""
    pieces = [*"ab.()|*+?[]^${}/", "\\d", "\\w", "[ab]", "[^a]"]
    pieces += ["(?:", "{2}", "{1,3}", "{3,1}", "\\", "{50}", "é", "(?=", "\\1", "\\b", "\n", '"']
    good = st.recursive(
        st.sampled_from(["a", "b", ".", "\\d", "[a-c]", "[^a]", "x{2,4}", "é"]),
        lambda inner: (
            st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})*")
            | st.tuples(inner, inner).map("".join)
        ),
        max_leaves=6,
    )
    return good | st.lists(st.sampled_from(pieces), min_size=1, max_size=9).map("".join)


def grammars() -> st.SearchStrategy[str]:
    """EBNF and Lark with a few rules that refer to each other, also in circles or to nothing."""
    word = st.sampled_from(
        [
            '"a"',
            '"b"',
            '""',
            "r0",
            "r1",
            "r2",
            "[a-c]",
            "[^a]",
            "(",
            ")",
            "|",
            "*",
            "+",
            "?",
            "{2}",
            "{3,1}",
            "/a+/",
            "A",
        ]
    )
    side = st.lists(word, min_size=1, max_size=6).map(" ".join)
    ebnf = st.tuples(side, side, side).map(
        lambda s: "\n".join(f"{n} ::= {x}" for n, x in zip(("root", "r1", "r2"), s, strict=True))
    )
    lark = st.tuples(side, side, side).map(
        lambda s: "\n".join(f"{n}: {x}" for n, x in zip(("start", "r1", "r2"), s, strict=True))
    )
    return ebnf | lark
