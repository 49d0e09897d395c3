r"""Finds out which features a regular expression uses, without running it. Structured output
backends need this, because their engines support different dialects.

The pattern is cut into pieces (`\d`, `[^a]`, `(?:`, `{2,3}`, …) as Python's `re` reads it; nothing
is validated.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["literal", "escape", "class", "any", "open", "close", "or", "anchor", "repeat"]

_TOKENS = re.compile(
    r"""
      (?P<escape> \\ (?: x[0-9a-fA-F]{2} | u[0-9a-fA-F]{4} | U[0-9a-fA-F]{8} | [pPN]\{[^}]*\} | [0-9]{1,3} | . ) )
    | (?P<class>  \[ \^? \]? (?: \\. | \[:\w+:\] | [^\]\\] )* \] )
    | (?P<open>   \( (?: \? (?: P?<(?![=!])\w+> | P=\w+ | P>\w+ | \#[^)]* | <?[=!] | > | [a-zA-Z]*-?[a-zA-Z]*:? | \( ) )? )
    | (?P<close>  \) )
    | (?P<or>     \| )
    | (?P<anchor> [\^$] )
    | (?P<repeat> (?: [*+?] | \{ \d* ,? \d* \} ) [?+]? )
    | (?P<any>    \. )
    | (?P<literal> . )
    """,  # noqa: E501
    re.VERBOSE | re.DOTALL,
)

MAX_LENGTH = 10_000
"""Maximum length of patterns that are analyzed; longer ones have the feature "excessive length" and
count as matching anything."""

_ASCII = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}


@dataclass(frozen=True, slots=True)
class Piece:
    kind: Kind
    text: str


def pieces(pattern: str) -> list[Piece]:
    """Return the pattern's pieces. Their texts, joined, are the pattern."""
    return [Piece(match.lastgroup, match.group()) for match in _TOKENS.finditer(pattern)]  # type: ignore[arg-type]


def features(pattern: str) -> frozenset[str]:
    """Return the names of features about which engines disagree: "look-around", "backreference",
    "word boundary", "inner anchor" (^ or $ not at an end of an alternative), "excessive length",
    "inline flag", "named group", "atomic group", "possessive repeat", "unicode property"."""
    if len(pattern) > MAX_LENGTH:
        return frozenset({"excessive length"})
    names: set[str] = set()
    parts = pieces(pattern)
    for index, part in enumerate(parts):
        if part.kind == "escape":
            names |= _of_escape(part.text)
        elif part.kind == "open":
            names |= _of_group(part.text)
        elif part.kind == "repeat" and len(part.text) > 1 and part.text.endswith("+"):
            names.add("possessive repeat")
        elif part.kind == "anchor" and not _is_outer(parts, index):
            names.add("inner anchor")
    return frozenset(names)


def mistake(pattern: str) -> str | None:
    """Return what is wrong with a pattern in every dialect: brackets or parentheses without a
    partner, a repeat of nothing, or {m,n} with m greater than n. None = nothing was found."""
    depth = 0
    before = ""
    for part in pieces(pattern):
        depth += (part.kind == "open" and not part.text.endswith(")")) - (part.kind == "close")
        if depth < 0 or part == Piece("literal", "[") or part == Piece("literal", "\\"):
            return f"{part.text!r} in the pattern has no partner"
        counts = (
            [int(number) for number in re.findall(r"[0-9]{1,9}", part.text)]
            if part.kind == "repeat"
            else []
        )
        if (
            part.kind == "repeat"
            and (counts or part.text[0] != "{")
            and before in ("", "open", "or")
        ):
            return f"{part.text!r} in the pattern repeats nothing"
        if len(counts) == 2 and counts[0] > counts[1]:
            return f"{part.text!r} in the pattern has its limits the wrong way round"
        before = part.kind
    return "a parenthesis in the pattern has no partner" if depth else None


def pattern_problem(pattern: str, refused: frozenset[str], max_size: int) -> str | None:
    """Why a pattern cannot be enforced: one of the refused features, or its size with its repeats
    written out; None = it can."""
    if wrong := features(pattern) & refused:
        return f"{min(wrong)} in the pattern is not supported"
    if (reason := mistake(pattern)) is not None:
        return reason
    size = expanded_size(pattern)
    return (
        f"the pattern is too large: {size} with its repeats written out, at most {max_size}"
        if size > max_size
        else None
    )


def string_problem(pattern: str) -> str | None:
    """The same for a backend that puts the pattern between the quotes of a JSON string as it is: it
    must not match what has to be escaped there."""
    if can_match(pattern, '"\\\n\x00\x1f'):
        return "a pattern that can match quotes, backslashes or control characters is not enforced"
    return None


def can_match(pattern: str, characters: str) -> bool:
    """Return whether a piece can match one of the characters: a negated class, ".", or a class or
    escape that contains one of them."""
    return len(pattern) > MAX_LENGTH or any(_matches(part, characters) for part in pieces(pattern))


def without_newlines(pattern: str) -> str:
    r"""Return the pattern with "." written as a class that excludes line ends, for engines whose
    "." matches them."""
    return "".join(r"[^\n\r]" if part.kind == "any" else part.text for part in pieces(pattern))


def without_anchors(pattern: str) -> str:
    """Return the pattern for engines that always match whole texts. This is correct only without
    the feature "inner anchor"."""
    return "".join("" if part.kind == "anchor" else part.text for part in pieces(pattern))


def with_ascii_classes(pattern: str) -> str:
    r"""Return the pattern with \d, \w and \s written as ASCII classes, because engines disagree
    about other characters."""

    def rewritten(part: Piece) -> str:
        if part.kind == "class":
            return re.sub(
                r"\\(.)", lambda match: _ASCII.get(match[1], match[0]), part.text, flags=re.DOTALL
            )
        members = _ASCII.get(part.text[1:]) if part.kind == "escape" else None
        return part.text if members is None else f"[{members}]"

    return "".join(map(rewritten, pieces(pattern)))


def expanded_size(pattern: str, counts_piece: Callable[[Piece], bool] = lambda piece: True) -> int:
    """Return the length of the pattern with its repeats written out. Automata grow at least as fast
    as this length. counts_piece: whether a piece counts; all do by default."""
    if len(pattern) > MAX_LENGTH:
        return len(pattern)
    stack = [0]
    last = 0
    for part in pieces(pattern):
        if part.kind == "open":
            stack.append(0)
            last = 0
        elif part.kind == "close":
            last = stack.pop() if len(stack) > 1 else 0
            stack[-1] += last
        elif part.kind == "repeat":
            counts = [int(count) for count in re.findall(r"\d+", part.text)]
            stack[-1] += last * (max(counts, default=1) - 1)
            last *= max(counts, default=1)
        elif part.kind not in ("or", "anchor"):
            last = int(counts_piece(part))
            stack[-1] += last
    return sum(stack)


def repeats_repeats(pattern: str) -> bool:
    """Return whether a group that contains a repeat is repeated, as in `([a-z]+ ?)+`. Such a
    pattern can often divide the same text in many ways."""
    stack = [False]
    closed = False
    for part in pieces(pattern):
        if part.kind == "open" and not part.text.endswith(")"):
            stack.append(False)
        elif part.kind == "repeat":
            if closed and part.text[0] != "?" and part.text != "{1}":
                return True
            stack[-1] = True
        closed = False
        if part.kind == "close" and len(stack) > 1:
            closed = stack.pop()
            stack[-1] |= closed
    return False


def is_wide(part: Piece) -> bool:
    """Return whether the piece stands for a large part of all characters."""
    return (
        part.kind == "any"
        or part.text[:2] in ("[^", r"\w", r"\W", r"\S", r"\D")
        or part.kind == "class"
        and r"\w" in part.text
    )


def _of_escape(text: str) -> set[str]:
    second = text[1]
    if second in "bB":
        return {"word boundary"}
    if second in "AZzG":
        return {"inner anchor"}
    if second in "pP":
        return {"unicode property"}
    return {"backreference"} if second in "123456789k" else set()


def _of_group(text: str) -> set[str]:
    if not text.startswith("(?") or text in ("(?:", "(?") or text.startswith("(?#"):
        return set()
    if text[2:].lstrip("<")[:1] in ("=", "!"):
        return {"look-around"}
    if text.startswith("(?>"):
        return {"atomic group"}
    if text.startswith(("(?P=", "(?P>", "(?(")):
        return {"backreference"}
    return {"named group"} if "<" in text else {"inline flag"}


def _is_outer(parts: list[Piece], index: int) -> bool:
    """Return whether ^ is at the start of its alternative, or $ at its end, in the whole pattern or
    in a group around it."""
    if parts[index].text == "^":
        neighbours = parts[:index]
        edge = ("open", "or")
        return not neighbours or (neighbours[-1].kind in edge and _is_at_edge(parts, index, -1))
    neighbours = parts[index + 1 :]
    edge = ("close", "or")
    return not neighbours or (neighbours[0].kind in edge and _is_at_edge(parts, index, +1))


def _is_at_edge(parts: list[Piece], index: int, step: int) -> bool:
    """Return whether nothing between the anchor and that end matches text, apart from other
    alternatives."""
    depth = 0
    skipping = False
    inward, outward = ("close", "open") if step < 0 else ("open", "close")
    i = index + step
    while 0 <= i < len(parts):
        kind = parts[i].kind
        if kind == inward:
            depth += 1
        elif kind == outward:
            if depth:
                depth -= 1
            else:
                skipping = False
                i += step
                if 0 <= i < len(parts) and parts[i].kind == "repeat":
                    return False
                continue
        elif kind == "or" and not depth:
            skipping = True
        if not skipping and kind not in (outward, "or"):
            return False
        i += step
    return True


def _matches(part: Piece, characters: str) -> bool:
    if part.kind == "any":
        return True
    if part.kind == "literal":
        return part.text in characters
    if (
        part.kind not in ("escape", "class")
        or _of_escape(part.text + " ")
        and part.kind == "escape"
    ):
        return False
    try:
        return any(re.fullmatch(part.text, character) for character in characters)
    except re.error:
        return True
