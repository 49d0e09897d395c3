"""What most often followed the last tokens of a request in a text."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from pegboard_draft_suffix.text import END, Text

MOST_OCCURRENCES = 16
"""Only the latest occurrences are compared, so that a frequent run costs no more than a rare
one."""
FIRST = itemgetter(0)


@dataclass(slots=True)
class Continuation:
    """Draft tokens. score: how many of them are expected to be right."""

    token_ids: list[int] = field(default_factory=list)
    score: float = 0.0


def continuation(
    text: Text, tail: array[int], most: int, factor: float, least: float
) -> Continuation:
    """Return the best continuation of `tail` that the text has.

    The occurrences that agree with the last k tokens of `tail` give one continuation for each k.
    The one with the highest score is returned: a long agreement has few occurrences and allows long
    drafts, a short one has more occurrences to count. most: maximum number of tokens. factor:
    maximum number of tokens per token that agrees. least: see `_follow`. Source: SuffixDecoding
    (Oliaro et al. 2024, arXiv 2411.04975), with a few latest occurrences instead of a tree of all.
    """
    best = Continuation()
    matches = text.matches(tail, MOST_OCCURRENCES)
    matches.sort(key=FIRST, reverse=True)
    indexes = list[int]()
    for length, group in groupby(matches, FIRST):
        indexes += [index for _, index in group]
        limit = min(most, int(factor * length))
        if limit <= best.score:
            break
        other = _follow(text.tokens, indexes, limit, least)
        if other.score > best.score:
            best = other
    return best


def _follow(tokens: Sequence[int], indexes: list[int], limit: int, least: float) -> Continuation:
    """Return the most frequent token after the indexes, then the most frequent after that one, and
    so on.

    The share of the indexes that go on with all tokens so far estimates the probability that these
    are right. The continuation ends before that falls below `least`.
    """
    count = len(indexes)
    path = Continuation()
    end = len(tokens)
    going = indexes
    for offset in range(limit):
        nexts = [tokens[index + offset] for index in going if index + offset < end]
        if not nexts:
            break
        token = nexts[0]
        same = nexts.count(token)
        if same < len(nexts):
            token, same = Counter(nexts).most_common(1)[0]
        if token == END or same < least * count:
            break
        if same < len(going):
            going = [
                index for index in going if index + offset < end and tokens[index + offset] == token
            ]
        path.token_ids.append(token)
        path.score += same / count
    return path
