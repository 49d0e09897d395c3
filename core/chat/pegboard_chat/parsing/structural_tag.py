r"""Formats of structural tags: the parts of a grammar, and regular expressions for text that must not contain a word.

The formats are those of https://xgrammar.mlc.ai/docs/structural_tag/structural_tag_api.html, as JSON. Two things are added. A
regex may also name words that its text must not contain (`excludes`), which not every backend enforces. And the tag says that it
is `prefix_free`: no text between two JSON values, or between a value and an end, can continue where it may end, so backends that
read the longest lexeme read the right one. Patterns use only what all engines read in the same way.
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
    """Exactly this text."""
    return {"type": "const_string", "value": value}


def regex(pattern: str, excludes: Sequence[str] = ()) -> Format:
    return {"type": "regex", "pattern": pattern, **({"excludes": list(excludes)} if excludes else {})}


def any_text(excludes: Sequence[str]) -> Format:
    """Any text that contains none of the words."""
    return {"type": "any_text", "excludes": list(excludes)}


def json_value(schema: Mapping[str, Any] | bool, excludes: Sequence[str] = ()) -> Format:
    """JSON that follows a schema. excludes: words that none of its strings and keys may contain."""
    return {"type": "json_schema", "json_schema": schema, **({"excludes": list(excludes)} if excludes else {})}


def sequence(*parts: Format) -> Format:
    """One after the other."""
    flat = [inner for part in parts for inner in (part["elements"] if part["type"] == "sequence" else [part])]
    flat = [part for part in flat if part != text("")]
    return flat[0] if len(flat) == 1 else {"type": "sequence", "elements": flat} if flat else text("")


def either(*choices: Format) -> Format:
    """Exactly one of the formats, of which there is at least one."""
    if text("") in choices:
        choices = tuple(choice for choice in choices if choice != text(""))
        return optional(either(*choices)) if choices else text("")
    return choices[0] if len(choices) == 1 else {"type": "or", "elements": list(choices)}


def optional(part: Format) -> Format:
    return {"type": "optional", "content": part}


def repeated(part: Format, least: int = 0, most: int = -1) -> Format:
    """most: -1 = no limit."""
    if most == -1 and least < 2:
        return {"type": "plus" if least else "star", "content": part}
    return {"type": "repeat", "min": least, "max": most, "content": part}


def listed(parts: Sequence[tuple[Format, bool]], separator: Format) -> Format:
    """Parts in this order with a separator between any two. Each part: its format, and whether it is required."""
    first = next((i for i, (_, is_required) in enumerate(parts) if is_required), None)
    if first is None:
        later = [optional(sequence(separator, part)) for part, _ in parts]
        return either(*(sequence(part, *later[i + 1 :]) for i, (part, _) in enumerate(parts)), text(""))
    before = [optional(sequence(part, separator)) for part, _ in parts[:first]]
    rest = [(sequence(separator, part), is_required) for part, is_required in parts[first + 1 :]]
    behind = [part if is_required else optional(part) for part, is_required in rest]
    return sequence(*before, parts[first][0], *behind)


def triggered(beginnings: Sequence[str], tags: Sequence[tuple[str, Format, str]]) -> Format:
    """Free text in which one of the tags (begin, content, end) must follow after a trigger. `beginnings`: the triggers. Each is
    the start of some tags' `begin`, and not the start of another trigger."""
    inner = [{"type": "tag", "begin": begin, "content": content, "end": end} for begin, content, end in tags]
    return {"type": "triggered_tags", "triggers": list(beginnings), "tags": inner}


def triggers(given: Constraint) -> tuple[str, ...]:
    """The texts after which the constraint applies; () when it applies to the whole output."""
    tag = json.loads(given.text) if given.kind == "structural_tag" else {}
    return tuple(tag.get("triggers") or tag.get("format", {}).get("triggers") or ())


def constraint(form: Format) -> Constraint:
    """The whole output has this format."""
    tag = {"type": "structural_tag", "prefix_free": True, "format": form}
    return Constraint("structural_tag", json.dumps(tag, ensure_ascii=False))


def without(words: Sequence[str]) -> str:
    """A pattern for any text that contains none of the words. All words begin with the same character and contain it nowhere
    else."""
    start, tree = _tree(words)
    begun = f"{_quoted(start)}{_begun(tree)}"
    return f"(?:{diverging(words)})*(?:{begun})*"


def diverging(words: Sequence[str], also: str = "") -> str:
    """A pattern for the shortest text that shows that none of the words begins here. See `without`. also: further characters, as
    the inside of a class, that the text does not begin with.
    """
    start, tree = _tree(words)
    begun = f"{_quoted(start)}{_begun(tree)}"
    return f"(?:{begun})*{_quoted(start)}{_left(tree, start)}|[^{_quoted(start, in_class=True)}{also}]"


def _tree(words: Sequence[str]) -> tuple[str, Mapping[str, Any]]:
    """The character with which the words begin, and what may follow, letter by letter."""
    start = words[0][0]
    if not all(word.rfind(start) == 0 for word in words):
        raise ValueError(f"words to exclude must begin with the same character and have it nowhere else, not {list(words)}")
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for char in word[1:]:
            node = node.setdefault(char, {})
        node.clear()
        node[""] = {}
    return start, tree


def _begun(tree: Mapping[str, Any]) -> str:
    """A beginning of the words, after their first character, that is not a whole word."""
    inner = [f"{_quoted(char)}{_begun(rest)}" for char, rest in tree.items() if "" not in rest]
    return f"(?:{'|'.join(inner)})?" if inner else ""


def _left(tree: Mapping[str, Any], start: str) -> str:
    """A beginning of the words and then a character that continues none of them."""
    ways = [f"{_quoted(char)}{_left(rest, start)}" for char, rest in tree.items() if "" not in rest]
    known = "".join(_quoted(char, in_class=True) for char in [*tree, start])
    return f"(?:{'|'.join([f'[^{known}]', *ways])})"


def _quoted(char: str, *, in_class: bool = False) -> str:
    special = r"\]^-[&~" if in_class else r"\.^$*+?{}[]|()"
    return f"\\{char}" if char in special else {"\n": r"\n", "\t": r"\t"}.get(char, char)


def exactly(value: str) -> str:
    """A pattern for exactly this text."""
    return "".join(map(_quoted, value))


def searched(pattern: str) -> str | None:
    """A pattern for whole texts that contain a match of `pattern` (the meaning in JSON schemas); None when it has inner
    anchors."""
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
    found = []
    for parts in alternatives:
        begins, ends = parts[:1] == ["^"], parts[-1:] == ["$"]
        inner = "".join(parts[begins : len(parts) - ends])
        found.append(f"{'' if begins else ANY}(?:{inner}){'' if ends else ANY}")
    return "|".join(found)
