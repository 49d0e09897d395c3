"""Damaged outputs for the contract of output parsers: mistakes of models, and what a parser may
make of them.

The rule: control tokens never reach content, except in text that is given back whole because it is
not a call. A call that began has valid JSON as its arguments, unless the text ends inside it. A
broken call does not take others with it. A call that is quoted in the reasoning is not a call. How
the text is cut into pieces changes nothing.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence

from pegboard_chat.parsing import Message

SIGNS = re.compile(r'[{}\[\]",:=()]')
DAMAGE = ("?", ",,", '"', "}", "{", "]", "\n", "x y")
NEAR = 8
"""How many of the tokens after one are exchanged with it."""


def mutated(text: str, tokens: Sequence[str], rng: random.Random) -> str:
    """Return the text with one mistake: cut off, a token left out, doubled or exchanged with
    another, or broken JSON."""
    spans = _spans(text, tokens)
    kind = rng.choice(["cut", "drop", "double", "swap", "json", "json"])
    if kind == "cut" or (kind != "json" and not spans):
        return text[: rng.randint(0, len(text))]
    if kind == "json":
        places = [match.start() for match in SIGNS.finditer(text)] or [0]
        place = rng.choice(places)
        return text[:place] + rng.choice(("", *DAMAGE)) + text[place + rng.randint(0, 1) :]
    start, end = rng.choice(spans)
    if kind == "drop":
        return text[:start] + text[end:]
    if kind == "double":
        return text[:end] + text[start:]
    return _swapped(text, (start, end), rng.choice(spans))


def token_mistakes(text: str, tokens: Sequence[str]) -> Iterator[str]:
    """Yield the text with each mistake that concerns a token: left out, doubled, or exchanged with
    another one near to it."""
    spans = _spans(text, tokens)
    for start, end in spans:
        yield text[:start] + text[end:]
        yield text[:end] + text[start:]
    for place, one in enumerate(spans):
        for other in spans[place + 1 : place + 1 + NEAR]:
            if text[slice(*one)] != text[slice(*other)]:
                yield _swapped(text, one, other)


def _spans(text: str, tokens: Sequence[str]) -> list[tuple[int, int]]:
    """Return where the tokens are in the text."""
    pattern = "|".join(map(re.escape, tokens))
    return [match.span() for match in re.finditer(pattern, text)] if tokens else []


def _swapped(text: str, one: tuple[int, int], other: tuple[int, int]) -> str:
    (a, b), (c, d) = sorted([one, other])
    return text if a == c else text[:a] + text[c:d] + text[b:c] + text[a:b] + text[d:]


def ends_among(tokens: Sequence[str]) -> tuple[str, ...]:
    """Return the tokens that only end something, by their names."""
    return tuple(token for token in tokens if re.search(r"</\w|\|/|end|\[/", token))


def loose_ends(content: str, tokens: Sequence[str]) -> list[str]:
    """Return the end tokens in the content that belong to nothing: no other token of the format is
    in the content before them, and they are not quoted."""
    ends = ends_among(tokens)
    begins = [token for token in tokens if token not in ends]
    first = min(
        (place for token in begins if (place := content.find(token)) >= 0), default=len(content)
    )
    return [
        token
        for token in ends
        for match in re.finditer(re.escape(token), content[:first])
        if content[match.start() - 1 : match.start()] not in ('"', "'", "`")
    ]


def broken_arguments(message: Message, text_after: bool) -> list[str]:
    """Return the arguments that are not a JSON object. The last call may be cut off, if it is open
    and the text ends in it."""
    broken = []
    for place, call in enumerate(message.tool_calls):
        is_last = place == len(message.tool_calls) - 1
        try:
            is_object = isinstance(json.loads(call.arguments), dict)
        except ValueError:
            is_object = False
        if not is_object and (call.is_complete or not is_last or text_after):
            broken.append(call.arguments)
    return broken
