"""Measures constraints, so that structured output backends can refuse those that would take too
much time or memory. Each backend has its own limits; they hold before anything is compiled."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pegboard.interfaces.structured_output import Constraint
from pegboard_chat.parsing.regex_syntax import MAX_LENGTH, expanded_size, pieces

_RULE = re.compile(r"::=|^[ \t]*[?!]?[A-Za-z_][\w.-]*[^\n:\"'/]*:", re.MULTILINE)
MAX_DEPTH = 50
"""The largest depth of groups in a pattern whose states are counted."""


@dataclass(frozen=True)
class SizeLimits:
    """properties: named properties of all objects together. optional: properties of one object that
    are not required. values: of enum, or choices. branches: of one anyOf, oneOf or allOf. parts:
    values of all kinds in the JSON text. rules: of a grammar. characters: of a grammar or a regular
    expression."""

    properties: int
    optional: int
    values: int
    branches: int
    parts: int
    rules: int
    characters: int


def excess(constraint: Constraint, limits: SizeLimits) -> str | None:
    """Return by what the constraint exceeds the limits, or None. The time grows with the length of
    its text."""
    text = constraint.text
    if constraint.kind in ("grammar", "regex"):
        if len(text) > limits.characters:
            return _over("characters", len(text), limits.characters)
        num_rules = len(_RULE.findall(text)) if constraint.kind == "grammar" else 0
        return _over("rules", num_rules, limits.rules) if num_rules > limits.rules else None
    if constraint.kind == "choice":
        num_choices = len(json.loads(text))
        return _over("choices", num_choices, limits.values) if num_choices > limits.values else None
    return None if constraint.kind == "json_object" else _json_excess(json.loads(text), limits)


def _json_excess(root: Any, limits: SizeLimits) -> str | None:
    num_properties = num_values = num_parts = 0
    waiting = [root]
    while waiting:
        part = waiting.pop()
        num_parts += 1
        if isinstance(part, list):
            waiting += part
            continue
        if not isinstance(part, dict):
            continue
        waiting += part.values()
        named = part.get("properties")
        required = part.get("required")
        listed = part.get("enum")
        if isinstance(named, dict):
            num_properties += len(named)
            num_optional = len(named) - (len(required) if isinstance(required, list) else 0)
            if num_optional > limits.optional:
                return _over("optional properties in one object", num_optional, limits.optional)
        num_values += len(listed) if isinstance(listed, list) else 0
        for key in ("anyOf", "oneOf", "allOf"):
            branches = part.get(key)
            if isinstance(branches, list) and len(branches) > limits.branches:
                return _over(f"branches in one {key}", len(branches), limits.branches)
    sizes = ("properties", num_properties), ("values", num_values), ("parts", num_parts)
    return next(
        (
            _over(name, size, getattr(limits, name))
            for name, size in sizes
            if size > getattr(limits, name)
        ),
        None,
    )


def _over(what: str, size: int, limit: int) -> str:
    return f"the constraint has {size} {what}; at most {limit} are compiled"


def too_many_states(pattern: str, limit: int) -> str | None:
    """Return a reason against a pattern whose automaton would have more than `limit` states or take
    too long to count, or None. Positions of the pattern are followed, as in Glushkov's
    construction. The pattern may have no look-around and no backreference."""
    if len(pattern) > MAX_LENGTH:
        return f"the pattern has {len(pattern)} characters; at most {MAX_LENGTH} are compiled"
    if (size := expanded_size(pattern)) > 10 * limit:
        return (
            f"the pattern is too large: {size} with its repeats written out, at most {10 * limit}"
        )
    try:
        follow, first, signs = _positions(pattern)
    except ValueError as error:
        return str(error)
    probes = sorted(
        {chr(code) for code in range(9, 127)}
        | {"é", "\u4e2d"}
        | {sign for sign in signs if len(sign) == 1}
    )
    fits = {sign: [_fits(sign, probe) for probe in probes] for sign in set(signs)}
    columns = {tuple(fits[sign][i] for sign in fits) for i in range(len(probes))}
    order = {sign: i for i, sign in enumerate(fits)}
    seen = {frozenset(first)}
    waiting = [frozenset(first)]
    work = 0
    while waiting:
        state = waiting.pop()
        for column in columns:
            work += len(state) + 1
            taken = [position for position in state if column[order[signs[position]]]]
            target = (
                frozenset().union(*(follow[position] for position in taken))
                if taken
                else frozenset()
            )
            if target not in seen:
                seen.add(target)
                waiting.append(target)
            if len(seen) > limit or work > 400 * limit:
                return f"the pattern's automaton is too large: over {limit} states"
    return None


def _fits(sign: str, character: str) -> bool:
    if len(sign) == 1 and sign != ".":
        return sign == character
    try:
        return re.fullmatch(sign, character) is not None
    except re.error:
        return True


Place = tuple[set[int], set[int], bool]
"""What a part of a pattern begins with, what it ends with, and whether it matches the empty
text."""


def _positions(pattern: str) -> tuple[list[set[int]], set[int], list[str]]:
    """Return which positions may follow each position, the first ones, and the sign at each.
    Repeats are written out."""
    follow: list[set[int]] = []
    signs: list[str] = []

    def joined(left: Place, right: Place) -> Place:
        for position in left[1]:
            follow[position] |= right[0]
        return (
            left[0] | (right[0] if left[2] else set()),
            right[1] | (left[1] if right[2] else set()),
            left[2] and right[2],
        )

    def built(node: Any) -> Place:
        if isinstance(node, str):
            follow.append(set())
            signs.append(node)
            return {len(signs) - 1}, {len(signs) - 1}, False
        if isinstance(node, _Repeat):
            copies = [
                built(node.inner)
                for _ in range(max(node.least, 1) if node.most is None else node.most)
            ]
            if node.most is None:
                for position in copies[-1][1]:
                    follow[position] |= copies[-1][0]
            copies = [
                copy if i < node.least else (copy[0], copy[1], True)
                for i, copy in enumerate(copies)
            ]
            return reduce(joined, copies, (set(), set(), True))
        ways = [reduce(joined, map(built, way), (set(), set(), True)) for way in node]
        return (
            set().union(*(way[0] for way in ways)),
            set().union(*(way[1] for way in ways)),
            any(way[2] for way in ways),
        )

    first, _, _ = built(_tree(pattern))
    return follow, first, signs


@dataclass(frozen=True)
class _Repeat:
    inner: Any
    least: int
    most: int | None


def _tree(pattern: str) -> list[list[Any]]:
    """Return the pattern as a list of alternatives, each a list of signs, repeats and lists like
    this one."""
    stack: list[list[list[Any]]] = [[[]]]
    for part in pieces(pattern):
        if part.kind == "open":
            stack.append([[]])
        elif part.kind == "close" and len(stack) > 1:
            inner = stack.pop()
            stack[-1][-1].append(inner)
        elif part.kind == "or":
            stack[-1].append([])
        elif part.kind == "repeat" and stack[-1][-1]:
            stack[-1][-1].append(_Repeat(stack[-1][-1].pop(), *_times(part.text)))
        elif part.kind != "anchor":
            stack[-1][-1].append(part.text)
        if len(stack) > MAX_DEPTH:
            raise ValueError(f"the pattern is nested deeper than {MAX_DEPTH} levels")
    return stack[0]


def _times(text: str) -> tuple[int, int | None]:
    """Return the limits of a repeat; None as the second one means that there is none."""
    if text[0] != "{":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[text[0]]
    low, comma, high = text.rstrip("?+")[1:-1].partition(",")
    least = int(low or 0)
    return least, least if not comma else int(high) if high else None
