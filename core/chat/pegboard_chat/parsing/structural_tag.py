r"""Formats of structural tags: the parts of a grammar, and regular expressions for text that must
not contain a word.

The formats are those of https://xgrammar.mlc.ai/docs/structural_tag/structural_tag_api.html, as
JSON. There are two additions. A regex may also name words that its text must not contain
(`excludes`); not every backend enforces this. The tags made here are also marked as `prefix_free`:
no text between two JSON values, or between a value and an end, can continue where it may end. So
backends that read the longest lexeme read the right one. Patterns use only what all engines read in
the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing.regex_syntax import features, pieces

Format = Mapping[str, Any]

ANY_CHARACTER = r"[\s\S]"
ANY = f"{ANY_CHARACTER}*"
INTEGER = r"-?(?:0|[1-9][0-9]{0,39})"
NUMBER = rf"{INTEGER}(?:\.[0-9]{{1,40}})?(?:[eE][-+]?[0-9]{{1,2}})?"
"""A JSON number of limited length, which stops a model that writes digits forever."""
IDENTIFIER = re.compile(r"[^\W\d]\w*")


def text(value: str) -> Format:
    """Return the format of exactly this text."""
    return {"type": "const_string", "value": value}


def regex(pattern: str, excludes: Sequence[str] = ()) -> Format:
    return {
        "type": "regex",
        "pattern": pattern,
        **({"excludes": list(excludes)} if excludes else {}),
    }


def any_text(excludes: Sequence[str]) -> Format:
    """Return the format of any text that contains none of the words."""
    return {"type": "any_text", "excludes": list(excludes)}


def json_value(schema: Mapping[str, Any] | bool, excludes: Sequence[str] = ()) -> Format:
    """Return the format of JSON that follows a schema. excludes: words that its strings and keys
    must not contain."""
    return {
        "type": "json_schema",
        "json_schema": schema,
        **({"excludes": list(excludes)} if excludes else {}),
    }


def sequence(*parts: Format) -> Format:
    """Return the format of these formats, one after the other."""
    flat = [
        inner
        for part in parts
        for inner in (part["elements"] if part["type"] == "sequence" else [part])
    ]
    flat = [part for part in flat if part != text("")]
    return (
        flat[0] if len(flat) == 1 else {"type": "sequence", "elements": flat} if flat else text("")
    )


def either(*choices: Format) -> Format:
    """Return a format that is exactly one of the formats. There must be at least one."""
    if text("") in choices:
        choices = tuple(choice for choice in choices if choice != text(""))
        return optional(either(*choices)) if choices else text("")
    return choices[0] if len(choices) == 1 else {"type": "or", "elements": list(choices)}


def optional(part: Format) -> Format:
    return {"type": "optional", "content": part}


def repeated(part: Format, least: int = 0, most: int = -1) -> Format:
    """Return a format repeated `least` to `most` times. most: -1 = no limit."""
    if most == -1 and least < 2:
        return {"type": "plus" if least else "star", "content": part}
    return {"type": "repeat", "min": least, "max": most, "content": part}


def listed(parts: Sequence[tuple[Format, bool]], separator: Format) -> Format:
    """Return the format of parts in this order, with a separator between any two. Each part is a
    format and whether it is required."""
    first = next((i for i, (_, is_required) in enumerate(parts) if is_required), None)
    if first is None:
        later = [optional(sequence(separator, part)) for part, _ in parts]
        return either(
            *(sequence(part, *later[i + 1 :]) for i, (part, _) in enumerate(parts)), text("")
        )
    before = [optional(sequence(part, separator)) for part, _ in parts[:first]]
    rest = [(sequence(separator, part), is_required) for part, is_required in parts[first + 1 :]]
    behind = [part if is_required else optional(part) for part, is_required in rest]
    return sequence(*before, parts[first][0], *behind)


def triggered(beginnings: Sequence[str], tags: Sequence[tuple[str, Format, str]]) -> Format:
    """Return the format of free text in which one of the tags (begin, content, end) must follow a
    trigger. beginnings: the triggers. Each is the start of the `begin` of some tags, and not the
    start of another trigger."""
    inner = [
        {"type": "tag", "begin": begin, "content": content, "end": end}
        for begin, content, end in tags
    ]
    return {"type": "triggered_tags", "triggers": list(beginnings), "tags": inner}


def triggers(given: Constraint) -> tuple[str, ...]:
    """Return the texts after which the constraint applies, or () if it applies to the whole
    output."""
    tag = json.loads(given.text) if given.kind == "structural_tag" else {}
    return tuple(tag.get("triggers") or tag.get("format", {}).get("triggers") or ())


def constraint(form: Format) -> Constraint:
    """Return a constraint: the whole output has this format."""
    tag = {"type": "structural_tag", "prefix_free": True, "format": form}
    return Constraint("structural_tag", json.dumps(tag, ensure_ascii=False))


def without(words: Sequence[str]) -> str:
    """Return a pattern for any text that contains none of the words. All words must begin with the
    same character and contain it nowhere else."""
    start, tree = _tree(words)
    begun = f"{_quoted(start)}{_begun(tree)}"
    return f"(?:{diverging(words)})*(?:{begun})*"


def diverging(words: Sequence[str], also: str = "") -> str:
    """Return a pattern for the shortest text that shows that none of the words begins here. See
    `without`. also: more characters that the text must not begin with, as the inside of a class.
    """
    start, tree = _tree(words)
    begun = f"{_quoted(start)}{_begun(tree)}"
    return (
        f"(?:{begun})*{_quoted(start)}{_left(tree, start)}|[^{_quoted(start, in_class=True)}{also}]"
    )


def _tree(words: Sequence[str]) -> tuple[str, Mapping[str, Any]]:
    """Return the character with which the words begin, and what may follow it as a tree of
    letters."""
    start = words[0][0]
    if not all(word.rfind(start) == 0 for word in words):
        raise ValueError(
            "words to exclude must begin with the same character and have it nowhere else, not "
            f"{list(words)}"
        )
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for char in word[1:]:
            node = node.setdefault(char, {})
        node.clear()
        node[""] = {}
    return start, tree


def _begun(tree: Mapping[str, Any]) -> str:
    """Return a pattern for a beginning of the words, after their first character, that is not a
    whole word."""
    inner = [f"{_quoted(char)}{_begun(rest)}" for char, rest in tree.items() if "" not in rest]
    return f"(?:{'|'.join(inner)})?" if inner else ""


def _left(tree: Mapping[str, Any], start: str) -> str:
    """Return a pattern for a beginning of the words and then a character that continues none of
    them."""
    ways = [f"{_quoted(char)}{_left(rest, start)}" for char, rest in tree.items() if "" not in rest]
    known = "".join(_quoted(char, in_class=True) for char in [*tree, start])
    return f"(?:{'|'.join([f'[^{known}]', *ways])})"


def _quoted(char: str, *, in_class: bool = False) -> str:
    special = r"\]^-[&~" if in_class else r"\.^$*+?{}[]|()"
    return f"\\{char}" if char in special else {"\n": r"\n", "\t": r"\t"}.get(char, char)


def exactly(value: str) -> str:
    """Return a pattern for exactly this text."""
    return "".join(map(_quoted, value))


def searched(pattern: str) -> str | None:
    """Return a pattern for whole texts that contain a match of `pattern`, which is its meaning in
    JSON schemas. Return None if it has inner anchors."""
    if "inner anchor" in features(pattern):
        return None
    alternatives: list[list[str]] = [[]]
    depth = 0
    for piece in pieces(pattern):
        depth += {"open": 1, "close": -1}.get(piece.kind, 0)
        if piece.kind == "or" and not depth:
            alternatives.append([])
        elif piece.kind == "anchor" and depth:
            return None
        else:
            alternatives[-1].append(piece.text)
    branches = []
    for parts in alternatives:
        begins = parts[:1] == ["^"]
        ends = parts[-1:] == ["$"]
        inner = "".join(parts[begins : len(parts) - ends])
        branches.append(f"{'' if begins else ANY}(?:{inner}){'' if ends else ANY}")
    return "|".join(branches)
