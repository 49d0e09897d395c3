"""Constraints for the contract tests of the kind `structured_output`, each with a way to check
results.

JSON_SCHEMAS: schemas as applications and pydantic write them, and one per keyword. SUITE: (schema,
valid instances, invalid instances), like the JSON Schema Test Suite. A backend may refuse any of
them, but it must enforce those that it accepts.
"""

from __future__ import annotations

from typing import Any

PERSON: dict[str, Any] = {
    "type": "object",
    "title": "Person",
    "properties": {
        "name": {"type": "string", "title": "Name"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}, "maxItems": 3},
        "address": {"$ref": "#/$defs/Address"},
    },
    "required": ["name", "age", "tags", "address"],
    "$defs": {
        "Address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "zip": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            },
            "required": ["street", "zip"],
        }
    },
}

TREE: dict[str, Any] = {
    "$ref": "#/$defs/Node",
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}, "maxItems": 2},
            },
            "required": ["value", "children"],
        }
    },
}

SHAPE: dict[str, Any] = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": "circle"}, "r": {"type": "integer"}},
            "required": ["kind", "r"],
        },
        {
            "type": "object",
            "properties": {"kind": {"const": "line"}, "on": {"type": "boolean"}},
            "required": ["kind", "on"],
        },
    ]
}

JSON_SCHEMAS: dict[str, dict[str, Any]] = {
    "person": PERSON,
    "tree": TREE,
    "shape": SHAPE,
    "optional properties": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "all optional": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "properties and map": {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": {"type": "integer"},
    },
    "nested arrays": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "maxItems": 3,
    },
    "array sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "string": {"type": "string"},
    "string sizes": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,4}$"},
    "pattern with any": {"type": "string", "pattern": "^.{3}$"},
    "pattern unanchored": {"type": "string", "pattern": "b+"},
    "pattern alternatives": {"type": "string", "pattern": "^a$|^b+$"},
    "pattern and length": {"type": "string", "pattern": "^a+$", "maxLength": 3},
    "enum": {"enum": ["red", 3, None, True, [1, "x"], {"k": "v"}]},
    "enum with quotes": {
        "type": "string",
        "enum": ['say "hi"', "back\\slash", "new\nline", "naïve"],
    },
    "enum of numbers": {"type": "integer", "enum": [1, 20, -3]},
    "const": {"const": {"a": [1, 'x"y']}},
    "integer": {"type": "integer"},
    "integer range": {"type": "integer", "minimum": -3, "maximum": 117},
    "integer exclusive": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "integer multiple": {"type": "integer", "multipleOf": 7},
    "number": {"type": "number"},
    "number range": {"type": "number", "minimum": 1.5, "maximum": 2.5},
    "number exclusive": {"type": "number", "exclusiveMinimum": 0},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "types": {"type": ["integer", "null", "boolean"]},
    "types with range": {"type": ["integer", "string"], "minimum": 4, "maxLength": 3},
    "any of": {
        "anyOf": [
            {"type": "integer"},
            {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        ]
    },
    "any of objects": {
        "anyOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
        ]
    },
    "any of beside type": {"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": -5}]},
    "one of overlapping": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "all of": {"allOf": [{"type": "integer"}, {"minimum": 3}]},
    "all of one": {"allOf": [{"type": "integer"}]},
    "ref beside": {"$ref": "#/$defs/x", "maximum": 3, "$defs": {"x": {"type": "integer"}}},
    "not": {"not": {"type": "string"}},
    "unique": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 2},
    "contains": {"type": "array", "items": {"type": "integer"}, "contains": {"const": 3}},
    "required only": {"type": "object", "required": ["b"]},
    "min properties": {
        "type": "object",
        "additionalProperties": {"type": "integer"},
        "minProperties": 2,
        "maxProperties": 3,
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^a": {"type": "integer"}},
        "additionalProperties": False,
    },
    "property names": {"type": "object", "propertyNames": {"pattern": "^[ab]+$"}},
    "dependent": {
        "type": "object",
        "properties": {"a": {}, "b": {}},
        "dependentRequired": {"a": ["b"]},
    },
    "if": {"type": "integer", "if": {"minimum": 5}, "then": {"multipleOf": 2}},
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "unknown format": {"type": "string", "format": "isbn"},
    "untyped properties": {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "untyped minimum": {"minimum": 4},
    "pointer": {
        "type": "array",
        "items": {"$ref": "#/definitions/a~1b"},
        "maxItems": 2,
        "definitions": {"a/b": {"type": "null"}},
    },
    "free object": {"type": "object"},
    "anything": {},
}

BAD_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "nonsense"},
    {"type": "object", "properties": {"a": {"type": "strin"}}},
    {"$ref": "#/$defs/missing"},
    {"$ref": "https://example.org/schema"},
    {"type": "string", "pattern": "(["},
)

SUITE: tuple[tuple[dict[str, Any], tuple[Any, ...], tuple[Any, ...]], ...] = (
    ({"minItems": 2}, ([1, 2], ["a", None, 3]), ([], [1])),
    ({"maxItems": 1}, ([], ["a"]), ([1, 2],)),
    ({"type": "integer"}, (0, -1, 42), (1.5, "1", True, None, [], {})),
    ({"type": "number"}, (0, -1.5, 2e3), ("1", True, None)),
    ({"type": "string"}, ("", "a b", "naïve"), (1, None, ["a"])),
    ({"type": "boolean"}, (True, False), (0, "true", None)),
    ({"type": "null"}, (None,), (0, False, "")),
    ({"type": "array", "items": {"type": "integer"}}, ([], [1, 2]), ([1, "x"], {"a": 1}, 1)),
    ({"type": ["integer", "string"]}, (1, "a"), (None, True, 1.5)),
    ({"enum": [1, "a", None]}, (1, "a", None), (2, "b", True, "")),
    ({"const": "x"}, ("x",), ("y", 1, "")),
    ({"type": "integer", "minimum": 10}, (10, 11, 100), (9, 0, -10)),
    ({"type": "integer", "maximum": 10}, (10, 9, -100), (11, 100)),
    ({"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 12}, (11,), (10, 12)),
    ({"type": "number", "minimum": 1.1}, (1.1, 2.6), (0.6, -3)),
    ({"type": "integer", "multipleOf": 3}, (0, 3, 9), (1, 4, 10)),
    ({"type": "string", "minLength": 2}, ("ab", "abc"), ("a", "")),
    ({"type": "string", "maxLength": 2}, ("", "ab"), ("abc",)),
    ({"type": "string", "pattern": "^a*$"}, ("", "aaa"), ("b", "aab")),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1}, ([1],), ([],)),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, ([], [1, 2]), ([1, 2, 3],)),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, ([1, 2],), ([1, 1],)),
    (
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "string"}},
        ([1, "a"],),
        (["a"], [1, 2]),
    ),
    ({"type": "array", "contains": {"const": 1}}, ([1],), ([2],)),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            "required": ["a"],
        },
        ({"a": 1}, {"a": 1, "b": "x"}),
        ({}, {"b": "x"}, {"a": "x"}, {"a": 1, "b": 2}, [], 1),
    ),
    (
        {"type": "object", "additionalProperties": {"type": "boolean"}},
        ({"x": True}, {}),
        ({"x": 1},),
    ),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
        ({"a": 1}, {}),
        ({"b": 1}, {"a": 1, "b": 2}),
    ),
    (
        {
            "type": "object",
            "patternProperties": {"^f": {"type": "integer"}},
            "additionalProperties": False,
        },
        ({"f": 1},),
        ({"f": "x"}, {"g": 1}),
    ),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, ({"ab": 1},), ({"abc": 1},)),
    ({"type": "object", "minProperties": 1}, ({"a": 1},), ({},)),
    ({"type": "object", "required": ["a"]}, ({"a": 1},), ({}, {"b": 1})),
    ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, (1, "a"), ("ab", None)),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, (1, "a"), (None, 1.5)),
    ({"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 2}]}, (1,), (3,)),
    ({"allOf": [{"type": "integer"}, {"minimum": 2}]}, (2,), (1, "a")),
    ({"not": {"type": "integer"}}, ("a",), (1,)),
    ({"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 6}}, (1, 6), (7,)),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, (1,), ("a",)),
    ({"$ref": "#/$defs/a", "maximum": 2, "$defs": {"a": {"type": "integer"}}}, (1,), (3, "a")),
    (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
        ({"a": {}}, {}),
        ({"a": 1}, {"b": {}}),
    ),
    ({"type": "string", "format": "date"}, ("2024-02-28",), ("2024-2-28", "soon")),
    ({"type": "string", "format": "ipv4"}, ("10.0.0.1",), ("10.0.0.256", "10.0.0")),
)

REGEXES: tuple[str, ...] = (
    r"[a-c]{2,4}x?",
    r"(yes|no|maybe)( please)?",
    r"\d{3}-\d{4}",
    r"^[A-Z][a-z]+(, [A-Z][a-z]+)*$",
    r"\w+@\w+\.(com|org)",
    r"a.b",
    r"[^0-9]{3}",
    r"(ab|cd)+?e",
    r"\$[0-9]+\.[0-9]{2}",
    r"^ab$|^cd$",
    r"(a|b){0,3}",
    r"é{1,2}ß?",
    r"\u0041\x42",
)

ODD_REGEXES: tuple[str, ...] = (
    r"(?=a)[ab]",
    r"(a|b)\1",
    r"\bfoo\b",
    r"a^b",
    r"(?i)abc",
    r"a(?!b)[bc]",
    r"x*+y",
)
"""Patterns that are valid in Python but that most automata cannot match. A backend must refuse or
enforce them."""

BAD_REGEXES: tuple[str, ...] = ("(", "[a", "a{2,1}")

CHOICES: tuple[list[str], ...] = (
    ["positive", "negative"],
    ["a", "ab", "abc"],
    ['say "hi"', "back\\slash", "new\nline", "naïve 👍"],
    ["one"],
    ["(a+)", "[b]", "c|d"],
)


def _chain(length: int, rule: str) -> str:
    return "\n".join(rule.format(i, i + 1) for i in range(length))


def _nested(depth: int) -> str:
    return '{"type": "array", "items": ' * depth + "{}" + "}" * depth


NO_TEXT: tuple[tuple[str, str], ...] = (
    ("json", '{"type": "string", "minLength": 9, "maxLength": 2}'),
    ("json", '{"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 1}'),
    ("json", '{"type": "integer", "minimum": 5, "maximum": 4}'),
    ("json", '{"type": "integer", "exclusiveMinimum": 5, "maximum": 5}'),
    ("json", '{"anyOf": [{"type": "number", "minimum": 1, "maximum": 0.5}]}'),
    (
        "json",
        (
            '{"type": "object", "properties": {"a": {"type": "string", "minLength": 1, '
            '"maxLength": 0}}, "required": ["a"]}'
        ),
    ),
    ("json", '{"enum": []}'),
    ("json", '{"type": "string", "enum": [1, 2]}'),
    ("regex", "[.*"),
    ("regex", "a{3,2}"),
    ("regex", "(a"),
    ("regex", "*a"),
)
"""(kind, text) of constraints that no text satisfies, or that are not well formed. Every backend
refuses them."""

HOSTILE: tuple[tuple[str, str], ...] = (
    *(
        ("json", f'{{"type": "integer", "{key}": {value}}}')
        for key in ("minimum", "maximum", "multipleOf")
        for value in (
            "1e999",
            "1e308",
            "-1e308",
            str(10**300),
            str(2**63),
            str(-(2**63)),
            '"5"',
            "true",
            "null",
            "[]",
            "0",
            "-1",
            "5e-324",
        )
    ),
    *(
        ("json", f'{{"type": "string", "{key}": {value}}}')
        for key in ("minLength", "maxLength")
        for value in (
            "-1",
            "1.5",
            '"2"',
            "null",
            "true",
            str(2**31),
            str(10**30),
            "100000",
        )
    ),
    *(
        ("json", f'{{"type": "array", "{key}": {value}}}')
        for key in ("minItems", "maxItems")
        for value in ("-1", '"2"', "1000000")
    ),
    *(
        ("json", f'{{"type": "object", "{key}": {value}}}')
        for key in (
            "properties",
            "required",
            "patternProperties",
            "$defs",
            "additionalProperties",
            "propertyNames",
            "minProperties",
            "maxProperties",
        )
        for value in ("3", '"a"', "[[]]", '{"a": 3}', "null")
    ),
    *(
        ("json", f'{{"{key}": {value}}}')
        for key in (
            "type",
            "enum",
            "anyOf",
            "oneOf",
            "allOf",
            "$ref",
            "const",
            "not",
            "format",
            "pattern",
        )
        for value in (
            "3",
            "[]",
            "[[]]",
            "{}",
            '"#"',
            '"#/"',
            '"#/$defs/~2"',
            "[{}]",
            '["string", "string"]',
        )
    ),
    ("json", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'),
    (
        "json",
        (
            '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": '
            '"#/$defs/a"}]}}}'
        ),
    ),
    ("json", '{"$ref": "#"}'),
    ("json", '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'),
    ("json", _nested(90)),
    ("json", '{"oneOf": [' + ", ".join('{"const": ' + str(i) + "}" for i in range(3000)) + "]}"),
    (
        "json",
        '{"type": "object", "properties": {'
        + ", ".join(f'"p{i}": {{}}' for i in range(20_000))
        + "}}",
    ),
    ("choice", "[" + ", ".join(f'"x{i}"' for i in range(30_000)) + "]"),
    ("choice", '[""]'),
    ("choice", '["", "a", "a"]'),
    ("choice", '["\\u0000", "\\u001f", "\\\\", "\\"", "\\ud83d\\ude00", "\\n"]'),
    ("regex", "(" * 3000 + "a" + ")" * 3000),
    ("regex", "(" * 3000),
    ("regex", "[" * 3000),
    ("regex", "^" * 3000),
    ("regex", "(^" * 3000 + ")" * 3000),
    ("regex", "a{1000000}"),
    ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    ("regex", "[ab]*a[ab]{20}"),
    ("regex", "(a*)*b"),
    ("regex", "$a"),
    ("regex", "[^\\s\\S]"),
    ("regex", "a" * 20_000),
    ("regex", "\\p{L}{3}\\u0000\\x00"),
    ("grammar", _chain(5_500, 'r{0} ::= "a" r{1}') + '\nroot ::= r0\nr5500 ::= "b"'),
    ("grammar", _chain(2_000, 'r{0}: "a" r{1}') + '\nstart: r0\nr2000: "b"'),
    ("grammar", "root ::= r0\n" + _chain(30, "r{0} ::= r{1} r{1} r{1}") + '\nr30 ::= "b"'),
    ("grammar", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    ("grammar", 'root ::= (("a"{1,1000}){1,1000}){1,1000}'),
    ("grammar", "root ::= root"),
    ("grammar", 'root ::= root root | "a" | ""'),
    ("grammar", 'root ::= ""'),
    ("grammar", "start: start"),
    ("grammar", "start: /[.*/"),
    ("grammar", '%llguidance {"max_tokens": 1e99}\nstart: "a"'),
    (
        "structural_tag",
        '{"type": "structural_tag", "format": {"type": "sequence", "elements": []}}',
    ),
    (
        "structural_tag",
        '{"type": "structural_tag", "format": {"type": "token", "token": 99999999}}',
    ),
    (
        "structural_tag",
        (
            '{"type": "structural_tag", "format": {"type": "or", "elements": [{"type": '
            '"const_string", "value": ""}]}}'
        ),
    ),
    ("structural_tag", '{"structures": [{"begin": "", "schema": 3, "end": ""}], "triggers": [""]}'),
    (
        "structural_tag",
        '{"structures": [{"begin": "a", "schema": {"type": "string", "minLength": 4, "maxLength": '
        '2}, "end": ""}], "triggers": ["a"]}',
    ),
)
"""(kind, text) of constraints that are odd, or large, or both. A backend may refuse them, but
nothing else may happen."""
