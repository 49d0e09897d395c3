"""Writes structural tags of the form with a `format` as Lark.

The library cuts text into lexemes, the longest first, and never goes back. Therefore a text and the
end that follows it must be one lexeme. So adjacent regular parts become one terminal, and JSON is
placed between terminals.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pegboard_chat.parsing.json_schema import restrictions
from pegboard_chat.parsing.regex_syntax import can_match
from pegboard_chat.parsing.schema_cases import DEFINITIONS, FORMATS
from pegboard_chat.parsing.structural_tag import ANY, exactly, searched, without

Format = Mapping[str, Any]

NO_LIMIT = -1
ANY_JSON = "any-json"
"""Name of the definition that replaces a schema without restrictions, once strings are
restricted."""


def rejection(tag: Mapping[str, Any]) -> str | None:
    """A part of the tag cannot be written as Lark."""
    try:
        tag_grammar(tag)
    except (ValueError, KeyError, TypeError) as error:
        return (
            str(error)
            if isinstance(error, ValueError)
            else f"the structural tag is incomplete: {error!r}"
        )
    return None


def tag_grammar(tag: Mapping[str, Any]) -> str:
    """Returns the tag as Lark text. Raises ValueError for a format that is not supported, and
    KeyError or TypeError for a broken tag."""
    writer = _Writer(is_prefix_free=tag.get("prefix_free") is True)
    start = writer.rule(tag["format"])
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.lines])


class _Writer:
    """lines: the rules and terminals so far. is_prefix_free: see
    `pegboard_chat.parsing.structural_tag`."""

    def __init__(self, *, is_prefix_free: bool) -> None:
        self.is_prefix_free = is_prefix_free
        self.lines: list[str] = []
        self._count = 0

    def rule(self, form: Format) -> str:
        """Returns the format as the right side of a rule."""
        kind = form["type"]
        if kind in _REPEATS or kind == "repeat":
            return f"{self._named(self.rule(form['content']))}{_times(form)}"
        if _is_regular(form) and (self.is_prefix_free or kind == "const_string"):
            return self._runs([form])
        if not self.is_prefix_free and kind not in (
            "json_schema",
            "tag",
            "token",
            "triggered_tags",
        ):
            raise ValueError(
                f"{kind!r} in a structural tag that is not said to be prefix_free is not supported"
            )
        if kind == "json_schema":
            return (
                "%json "
                f"{json.dumps(with_free_strings(form['json_schema'], form.get('excludes', ())))}"
            )
        if kind == "token":
            return _tokens([form["token"]])
        if kind == "sequence":
            return self._runs(form["elements"])
        if kind == "tag":
            return self._runs(_parts(form))
        if kind == "or":
            return self._named(" | ".join(self.rule(inner) for inner in form["elements"]))
        return self._triggered(form)

    def _runs(self, parts: Sequence[Format]) -> str:
        """Writes a sequence of parts, with adjacent regular parts as one terminal. If some parts
        are not regular, an optional part stays separate, because it could begin like the part after
        it."""
        are_all = all(map(_is_regular, parts))
        terms: list[str] = []
        run: list[str] = []
        for part in [*parts, None]:
            if part is not None and _is_regular(part) and (are_all or part["type"] in _SINGLE):
                run.append(_pattern(part))
                continue
            if any(run):
                terms.append(self._terminal(" ".join(filter(None, run))))
            run = []
            if part is not None:
                terms.append(self.rule(part))
        return " ".join(terms) or '""'

    def _triggered(self, form: Format) -> str:
        if form["type"] != "triggered_tags":
            raise ValueError(f"the structural tag's format {form['type']!r} is not supported")
        if odd := [
            key for key in ("at_least_one", "stop_after_first", "excludes") if form.get(key)
        ]:
            raise ValueError(f"{odd[0]} of {form['type']} is not supported")
        any_text = self._terminal(r"/[\s\S]*/")
        ways = []
        for tag in form["tags"]:
            if not isinstance(tag["begin"], str):
                ways.append(f"{any_text} {self._runs(_parts(tag))}")
                continue
            trigger = next(
                (text for text in form["triggers"] if tag["begin"].startswith(text)), None
            )
            if not trigger:
                raise ValueError(
                    f"begin {tag['begin']!r} starts with none of the triggers {form['triggers']}"
                )
            until = self._named(f"{any_text} {json.dumps(trigger)}", "[lazy]")
            ways.append(f"{until} {self._runs(_parts(tag, len(trigger)))}")
        if form.get("special_tokens"):
            ways.append(f"{any_text} {_tokens(form['special_tokens'])}")
        if not ways:
            raise ValueError("a structural tag without tags")
        return f"{self._named(' | '.join(ways))}* {any_text}"

    def _named(self, body: str, attributes: str = "") -> str:
        self._count += 1
        self.lines.append(f"rule_{self._count}{attributes}: {body}")
        return f"rule_{self._count}"

    def _terminal(self, body: str) -> str:
        self._count += 1
        self.lines.append(f"TEXT_{self._count}: {body}")
        return f"TEXT_{self._count}"


_SINGLE = ("const_string", "regex", "any_text", "sequence", "or")
_REPEATS = {"optional": "?", "star": "*", "plus": "+"}


def _tokens(token_ids: Sequence[int]) -> str:
    """Writes a choice of tokens as Lark. Adjacent ids are written as ranges."""
    if not all(isinstance(token, int) for token in token_ids):
        raise ValueError("tokens of structural tags are supported only by their ids")
    ranges: list[list[int]] = []
    for token in sorted(token_ids):
        if ranges and token == ranges[-1][1] + 1:
            ranges[-1][1] = token
        else:
            ranges.append([token, token])
    return f"<[{','.join(str(low) if low == high else f'{low}-{high}' for low, high in ranges)}]>"


def _times(form: Format) -> str:
    if form["type"] in _REPEATS:
        return _REPEATS[form["type"]]
    return f"{{{form['min']},{'' if form['max'] == NO_LIMIT else form['max']}}}"


def _parts(tag: Format, skip: int = 0) -> list[Format]:
    """Writes a tag as a sequence. skip: the number of characters of its beginning that are already
    written."""
    begin = tag["begin"][skip:] if isinstance(tag["begin"], str) else tag["begin"]
    edges = [
        {"type": "const_string", "value": edge} if isinstance(edge, str) else edge
        for edge in (begin, tag["end"])
    ]
    if not all(isinstance(edge, Mapping) for edge in edges):
        raise ValueError("a tag with several ends is not supported")
    content = tag["content"]
    return [
        edges[0],
        *(content["elements"] if content["type"] == "sequence" else [content]),
        edges[1],
    ]


def _is_regular(form: Format) -> bool:
    kind = form["type"]
    if kind in ("const_string", "regex", "any_text"):
        return True
    if kind in ("sequence", "or"):
        return all(map(_is_regular, form["elements"]))
    return (kind in _REPEATS or kind == "repeat") and _is_regular(form["content"])


def _pattern(form: Format) -> str:
    """Returns a regular format as the right side of a terminal; "" = the empty text."""
    kind = form["type"]
    if kind == "const_string":
        return json.dumps(form["value"], ensure_ascii=False) if form["value"] else ""
    if kind == "regex":
        return _regex(form)
    if kind == "any_text":
        return _regex({"pattern": without(form["excludes"]) if form.get("excludes") else ANY})
    if kind == "sequence":
        return f"({' '.join(filter(None, map(_pattern, form['elements'])))})"
    if kind == "or":
        return f"({' | '.join(map(_pattern, form['elements']))})"
    return f"({_pattern(form['content'])}){_times(form)}"


def _regex(form: Format) -> str:
    import llguidance

    pattern = f"/{llguidance.regex_to_lark(form['pattern'], 'dws')}/" if form["pattern"] else ""
    if not pattern or not form.get("excludes"):
        return pattern
    words = llguidance.regex_to_lark("|".join(map(exactly, form["excludes"])), "")
    return f"({pattern} & ~/(?s:.*)(?:{words})(?s:.*)/)"


def with_free_strings(schema: Any, words: Sequence[str]) -> Any:
    """Returns the schema with the words excluded from all strings and keys. A JSON escape counts as
    the character that it represents. Objects that name their properties have no others. Raises
    ValueError where the restriction cannot be combined with the schema."""
    if not words:
        return schema
    free = f"^(?:{without(words)})$"
    reference = {"$ref": f"#/$defs/{ANY_JSON}"}
    keys = {"type": "object", "patternProperties": {free: reference}, "additionalProperties": False}
    definition = {
        "anyOf": [
            {"type": "string", "pattern": free},
            {"type": ["number", "boolean", "null"]},
            {"type": "array", "items": reference},
            keys,
        ]
    }
    rewriting = _Rewriting(tuple(words), free, reference)
    rewritten = rewriting.schema(schema)
    definitions = {
        key: {name: rewriting.schema(inner) for name, inner in schema[key].items()}
        for key in DEFINITIONS
        if key in schema
    }
    definitions["$defs"] = {**definitions.get("$defs", {}), ANY_JSON: definition}
    return {**rewritten, **definitions}


@dataclass(frozen=True)
class _Rewriting:
    """words: the excluded words; free: the pattern of strings without them; any: a reference to the
    schema of any value."""

    words: tuple[str, ...]
    free: str
    any: Mapping[str, str]

    def schema(self, schema: Any) -> Any:
        if schema is False:
            return False
        used = restrictions({} if schema is True else schema)
        if not used:
            return self.any
        for key in ("anyOf", "oneOf", "allOf"):
            if key in used:
                return {**schema, key: [self.schema(inner) for inner in schema[key]]}
        if "$ref" in used:
            return schema
        if used & {"enum", "const"}:
            return self._constants(schema)
        if "type" not in used:
            raise ValueError(
                f"{', '.join(sorted(used))} without type where some words are excluded"
            )
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        changed = dict(schema)
        if "string" in names:
            changed |= self._string(used, schema)
        if "array" in names:
            changed |= self._array(schema)
        if "object" in names:
            changed |= self._object(schema)
        return changed

    def _constants(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        kept = [
            value
            for value in values
            if not any(word in json.dumps(value, ensure_ascii=False) for word in self.words)
        ]
        if not kept:
            raise ValueError("all constants contain an excluded word")
        return {**{key: value for key, value in schema.items() if key != "const"}, "enum": kept}

    def _string(self, used: set[str], schema: Mapping[str, Any]) -> Mapping[str, Any]:
        if "format" in used and schema["format"] not in FORMATS:
            raise ValueError(f"format {schema['format']!r} where some words are excluded")
        if "format" in used:
            return {}
        if "pattern" not in used:
            return {"pattern": self.free}
        pattern = searched(schema["pattern"])
        if pattern is None or ANY in pattern or can_match(pattern, self.words[0][0]):
            raise ValueError(f"the pattern {schema['pattern']!r} where some words are excluded")
        return {}

    def _array(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        changed: dict[str, Any] = {"items": self.schema(schema.get("items", True))}
        if "prefixItems" in schema:
            changed["prefixItems"] = [self.schema(inner) for inner in schema["prefixItems"]]
        return changed

    def _object(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        others = schema.get("additionalProperties")
        properties = schema.get("properties")
        if "patternProperties" in schema or properties and others not in (None, False):
            raise ValueError("properties in addition to named ones where some words are excluded")
        if properties is None and others is not False:
            return {
                "patternProperties": {self.free: self.schema(True if others is None else others)},
                "additionalProperties": False,
            }
        changed = {name: self.schema(inner) for name, inner in (properties or {}).items()}
        if any(word in name for word in self.words for name in changed):
            raise ValueError("the name of a property contains an excluded word")
        return {"properties": changed, "additionalProperties": False}
