"""Finds out which constraints a structured output backend fully enforces, above all JSON schemas.
Backends silently ignore what they do not know. A `Dialect` describes as data what a backend can do.
`problem` finds the first place where a schema asks for more. Keywords are those of the JSON Schema
drafts 4 to 2020-12; others restrict nothing and are ignored, as the specification says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pegboard.interfaces.structured_output import Constraint, StructuredOutputNeed

Schema = Mapping[str, Any]

KEYWORDS: Mapping[str, frozenset[str]] = {
    "string": frozenset(["minLength", "maxLength", "pattern", "format"]),
    "number": frozenset(
        ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
    ),
    "array": frozenset(
        [
            "items",
            "prefixItems",
            "additionalItems",
            "unevaluatedItems",
            "minItems",
            "maxItems",
            "uniqueItems",
            "contains",
            "minContains",
            "maxContains",
        ]
    ),
    "object": frozenset(
        [
            "properties",
            "patternProperties",
            "additionalProperties",
            "unevaluatedProperties",
            "propertyNames",
            "required",
            "minProperties",
            "maxProperties",
            "dependentRequired",
            "dependentSchemas",
            "dependencies",
        ]
    ),
    "any": frozenset(
        [
            "type",
            "enum",
            "const",
            "anyOf",
            "oneOf",
            "allOf",
            "not",
            "if",
            "then",
            "else",
            "$ref",
            "$dynamicRef",
            "$recursiveRef",
        ]
    ),
}
"""Keywords that restrict values, by the type of value that they apply to ("number" includes
integers)."""

MAX_BRANCHES = 100
"""The maximum number of branches of oneOf."""

TYPES = frozenset(["string", "number", "integer", "boolean", "null", "array", "object"])

_RESTRICTING = frozenset().union(*KEYWORDS.values())
_NO_EFFECT: Mapping[str, object] = {
    "uniqueItems": False,
    "additionalItems": True,
    "unevaluatedItems": True,
    "minLength": 0,
    "minItems": 0,
    "minProperties": 0,
    "unevaluatedProperties": True,
}
_BY_NAME = frozenset(
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"]
)
_LISTS = frozenset(["anyOf", "oneOf", "allOf", "prefixItems", "items"])
_ONE = frozenset(
    [
        "items",
        "additionalProperties",
        "additionalItems",
        "not",
        "if",
        "then",
        "else",
        "contains",
        "propertyNames",
        "unevaluatedProperties",
        "unevaluatedItems",
    ]
)
_CLOSING = frozenset(
    [
        "additionalProperties",
        "unevaluatedProperties",
        "additionalItems",
        "unevaluatedItems",
        "items",
    ]
)


@dataclass(frozen=True)
class Dialect:
    """string … object: the keywords that a backend enforces on values of this type. All
    combinations are enforced unless `extra` objects, except that of pattern, format and lengths
    only one may be used at a time. formats: values of `format`. is_recursive: references may lead
    back to themselves. one_of: oneOf is enforced if the branches visibly exclude each other.
    several_types: a list of types may have keywords of strings, arrays and objects. pattern(text),
    extra(schema): they return the backend's own objection to the pattern of a string, and to one
    subschema, as text; None = no objection."""

    string: frozenset[str]
    number: frozenset[str]
    array: frozenset[str]
    object: frozenset[str]
    formats: frozenset[str] = frozenset()
    is_recursive: bool = True
    one_of: bool = True
    several_types: bool = True
    pattern: Callable[[str], str | None] = lambda pattern: None
    extra: Callable[[Schema], str | None] = lambda schema: None


def suits_by(
    rejection: Callable[[Constraint], str | None],
) -> Callable[[StructuredOutputNeed], list[str]]:
    """The `suits` of a backend's spec, from its `reject`: the reason against a constraint that is
    given with its text."""

    def suits(need: StructuredOutputNeed) -> list[str]:
        if need.constraint is None or need.text is None:
            return []
        text = need.text if isinstance(need.text, str) else json.dumps(need.text)
        # unknown kinds stop at `supports`
        reason = rejection(Constraint(need.constraint, text))  # type: ignore[arg-type]
        return [] if reason is None else [reason]

    return suits


def subschemas(schema: Any, path: str = "#") -> Iterator[tuple[str, Any]]:
    """Yield (JSON pointer, subschema) for the schema and everything inside it, parents first.
    Booleans are also schemas. Values that are not schemas but are in the place of one are
    included."""
    yield path, schema
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        here = f"{path}/{key}"
        if key in _BY_NAME and isinstance(value, Mapping):
            for name, inner in value.items():
                yield from subschemas(inner, f"{here}/{name}")
        elif key in _LISTS and isinstance(value, list):
            for index, inner in enumerate(value):
                yield from subschemas(inner, f"{here}/{index}")
        elif key in _ONE:
            yield from subschemas(value, here)


def restrictions(schema: Schema) -> set[str]:
    """Return the keywords of this one subschema that restrict values."""
    return {
        key
        for key, value in schema.items()
        if key in _RESTRICTING and _NO_EFFECT.get(key, _RESTRICTING) != value
    }


_COUNTS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_FORMS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(["pattern", "format", "$ref"], (str,)),
    **dict.fromkeys(
        [
            "properties",
            "patternProperties",
            "$defs",
            "definitions",
            "dependentSchemas",
            "dependentRequired",
        ],
        (dict,),
    ),
    **dict.fromkeys(["enum", "required", "anyOf", "oneOf", "allOf", "prefixItems"], (list,)),
    "type": (str, list),
}
LARGEST = 2**63 - 1
"""Numbers beyond this, and counts beyond `LARGEST_COUNT`, are refused: libraries hold them in words
and in floats."""
LARGEST_COUNT = 2**31 - 1


def mistake(schema: Any) -> str | None:
    """Return what is wrong with a schema for every backend, and where: a value of the wrong type or
    size, or limits that contradict each other. None = nothing was found. A contradiction is refused
    in a branch, too, although another branch could be taken."""
    for path, inner in subschemas(schema):
        if isinstance(inner, Mapping) and (reason := _mistake_here(inner)) is not None:
            return f"{reason} at {path}"
    return None


def _mistake_here(schema: Schema) -> str | None:
    for key, value in schema.items():
        shown = repr(value) if not isinstance(value, list | dict | int) else type(value).__name__
        if key in _COUNTS and not (type(value) is int and 0 <= value <= LARGEST_COUNT):
            return f"{key} must be an integer from 0 to {LARGEST_COUNT}, got {shown}"
        if key in _NUMBERS and not (type(value) in (int, float) and abs(value) <= LARGEST):
            return f"{key} must be a number from {-LARGEST} to {LARGEST}, got {shown}"
        if key in _FORMS and not isinstance(value, _FORMS[key]):
            return (
                f"{key} must be {' or '.join(form.__name__ for form in _FORMS[key])}, got {shown}"
            )
    if not all(isinstance(name, str) for name in schema.get("required", ())):
        return "required must be a list of names"
    for low in ("minLength", "minItems", "minProperties", "minContains"):
        high = low.replace("min", "max")
        if schema.get(low, 0) > schema.get(high, LARGEST_COUNT):
            return f"{low} {schema[low]} is greater than {high} {schema[high]}, so no value fits"
    return _empty_range(schema)


def _empty_range(schema: Schema) -> str | None:
    low = max(schema.get("minimum", -LARGEST), schema.get("exclusiveMinimum", -LARGEST))
    high = min(schema.get("maximum", LARGEST), schema.get("exclusiveMaximum", LARGEST))
    is_open = low == schema.get("exclusiveMinimum") or high == schema.get("exclusiveMaximum")
    if low > high or low == high and is_open:
        return f"no number lies between the minimum {low} and the maximum {high}"
    if schema.get("multipleOf", 1) <= 0:
        return "multipleOf must be greater than 0"
    return None


def problem(schema: Any, dialect: Dialect) -> str | None:
    """Return which part of the schema is not enforced, and where, or None if all of it is
    enforced."""
    if (reason := mistake(schema)) is not None:
        return reason
    for path, inner in subschemas(schema):
        if inner is False and not _closes(path):
            return f"false at {path} allows no value"
        if isinstance(inner, bool):
            continue
        if not isinstance(inner, Mapping):
            return f"{path} is not a schema"
        if _is_name(path):
            inner = {"type": "string", **inner}
        reason = _problem_here(inner, schema, dialect)
        if reason is not None:
            return f"{reason} at {path}"
    return None


def _is_name(path: str) -> bool:
    """Whether the schema in this place describes the names of properties, which are strings."""
    *before, last = path.split("/")
    return last == "propertyNames" and before[-1:] != [] and before[-1] not in _BY_NAME


def _closes(path: str) -> bool:
    """Whether `false` in this place means that nothing more is allowed."""
    *_, before, last = path.split("/") if path.count("/") else ("", path)
    return last in _CLOSING and before not in _BY_NAME


def resolve(root: Any, reference: str) -> Any:
    """Return the target of a reference into the document itself. Raises KeyError, or another
    LookupError, if there is none."""
    if reference != "#" and not reference.startswith("#/"):
        raise KeyError(reference)
    target = root
    for part in reference.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        target = target[int(part)] if isinstance(target, list) else target[part]
    return target


def _problem_here(schema: Schema, root: Any, dialect: Dialect) -> str | None:
    used = restrictions(schema)
    for alone in ("$ref", "anyOf", "oneOf", "allOf"):
        if alone in used:
            if used - {alone}:
                return f"{alone} next to {', '.join(sorted(used - {alone}))} is not enforced"
            return _combined(alone, schema, root, dialect)
    if "const" in used or "enum" in used:
        return _listed(schema, used)
    if unknown := used & (KEYWORDS["any"] - {"type"}):
        return f"{min(unknown)} is not enforced"
    return _typed(schema, used, dialect) or _own(schema, dialect)


def _own(schema: Schema, dialect: Dialect) -> str | None:
    """Return what is not enforced of the schema's combinations of keywords and its pattern, or the
    objection of `extra`."""
    ways = [
        keys
        for keys in ({"pattern"}, {"format"}, {"minLength", "maxLength"})
        if keys & schema.keys()
    ]
    if len(ways) > 1:
        return "pattern, format and lengths together are not enforced"
    has_keywords = bool(schema.keys() & (dialect.string | dialect.array | dialect.object))
    if has_keywords and not dialect.several_types and isinstance(schema.get("type"), list):
        return "several types with further keywords are not enforced"
    pattern = schema.get("pattern")
    objection = dialect.pattern(pattern) if isinstance(pattern, str) else None
    return objection or dialect.extra(schema)


def _combined(keyword: str, schema: Schema, root: Any, dialect: Dialect) -> str | None:
    value = schema[keyword]
    if keyword == "$ref":
        try:
            resolve(root, value)
        except (LookupError, ValueError, TypeError, AttributeError):
            return f"$ref {value!r} leads nowhere inside the schema"
        if not dialect.is_recursive and _is_circular(root, value):
            return f"the recursive $ref {value!r} is not enforced"
        return None
    if not isinstance(value, list) or not value:
        return f"{keyword} is not a list of schemas"
    if keyword == "allOf" and len(value) > 1:
        return "allOf of several schemas is not enforced"
    if keyword == "oneOf" and not (dialect.one_of and exclude_each_other(value, root)):
        return "oneOf whose branches do not visibly exclude each other is not enforced"
    return None


def _listed(schema: Schema, used: set[str]) -> str | None:
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if "const" in schema and "enum" in schema or used - {"const", "enum", "type"}:
        return f"{' and '.join(sorted(used - {'type'}))} together are not enforced"
    if not isinstance(values, list) or not values:
        return "enum is not a list of values"
    if "type" not in schema:
        return None
    wrong = [value for value in values if not _types_of(value) & set(_type_names(schema))]
    return (
        f"{wrong[0]!r} is not of type {schema['type']!r}, which is not enforced" if wrong else None
    )


def _typed(schema: Schema, used: set[str], dialect: Dialect) -> str | None:
    names = _type_names(schema)
    if unknown := set(names) - TYPES:
        return f"type {min(unknown)!r} is unknown"
    if not names:
        implied = [kind for kind in ("array", "object") if used & KEYWORDS[kind]]
        if used and (len(implied) != 1 or used - KEYWORDS[implied[0]]):
            return f"{', '.join(sorted(used))} without type is not enforced"
        names = implied
    able = {
        "string": dialect.string,
        "number": dialect.number,
        "array": dialect.array,
        "object": dialect.object,
    }
    for kind, keywords in able.items():
        speaks = kind in names or kind == "number" and "integer" in names
        for keyword in sorted(used & KEYWORDS[kind] if speaks else ()):
            if keyword not in keywords:
                return f"{keyword} is not enforced"
    if "format" in used and "string" in names and schema["format"] not in dialect.formats:
        return f"format {schema['format']!r} is not enforced"
    if "object" in names:
        return _named(schema)
    return None


def _named(schema: Schema) -> str | None:
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return "properties is not an object, or required is not a list,"
    missing = [name for name in required if name not in properties]
    return (
        f"required {missing[0]!r} is not among the properties, which is not enforced"
        if missing
        else None
    )


def _type_names(schema: Schema) -> list[str]:
    value = schema.get("type", [])
    return [str(name) for name in value] if isinstance(value, list) else [str(value)]


def _types_of(value: object) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if value is None:
        return {"null"}
    if isinstance(value, int) or isinstance(value, float) and value.is_integer():
        return {"integer", "number"}
    by_class = {float: "number", str: "string", list: "array", dict: "object"}
    return {by_class[type(value)]}


def _is_circular(root: Any, start: str) -> bool:
    """Return whether references from the target of `start` lead back to a place that was already
    visited."""

    done: set[str] = set()

    def visit(reference: str, above: tuple[str, ...]) -> bool:
        if reference in above:
            return True
        if reference in done:
            return False
        done.add(reference)
        try:
            target = resolve(root, reference)
        except (LookupError, ValueError, TypeError, AttributeError):
            return False
        inner = [
            item["$ref"]
            for _, item in subschemas(target)
            if isinstance(item, Mapping) and "$ref" in item
        ]
        return any(visit(name, (*above, reference)) for name in inner)

    return visit(start, ())


def exclude_each_other(branches: Sequence[Any], root: Any) -> bool:
    """Return whether no value can fit two of the schemas, as far as their types and constants show.
    They are compared in pairs, so no more than `MAX_BRANCHES` are looked at."""
    if len(branches) > MAX_BRANCHES:
        return False
    schemas = [_follow(branch, root) for branch in branches]
    return all(_exclusive(a, b) for i, a in enumerate(schemas) for b in schemas[i + 1 :])


def _follow(schema: Any, root: Any) -> Any:
    for _ in range(16):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            break
        try:
            schema = resolve(root, schema["$ref"])
        except (LookupError, ValueError, TypeError, AttributeError):
            break
    return schema


def _exclusive(a: Any, b: Any) -> bool:
    """Return whether types or constants show that no value fits both: different types, different
    constants, or a property that both require with different constants."""
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return False
    values = _values(a), _values(b)
    if values[0] is not None and values[1] is not None:
        return not any(left == right for left in values[0] for right in values[1])
    types = _possible_types(a), _possible_types(b)
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    if types != ({"object"}, {"object"}):
        return False
    shared = set(a.get("required", ())) & set(b.get("required", ()))
    inner = [
        (a.get("properties", {}).get(name), b.get("properties", {}).get(name)) for name in shared
    ]
    return any(_exclusive(left, right) for left, right in inner)


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _possible_types(schema: Schema) -> set[str]:
    """Return the types of a schema; the empty set means any type."""
    values = _values(schema)
    if values is not None:
        return set().union(*(_types_of(value) for value in values))
    names = set(_type_names(schema))
    return names | {"integer"} if "number" in names else names
