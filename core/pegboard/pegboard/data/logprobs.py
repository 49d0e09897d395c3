"""Two ways to store the logprobs of many positions: vLLM's list of dicts, or flat lists without one
object per entry."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from pegboard.data.output import Logprob
from pegboard.data.request import PositionLogprobs

Row = dict[int, Logprob]


class TokenTexts(dict[int, str]):
    """The text of single token ids. Each id is decoded when it is first read."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text


def row_of(position: PositionLogprobs, texts: TokenTexts | None) -> Row:
    """Return {token id: Logprob} with the chosen token first. If `texts` is None, every
    `decoded_token` is None."""
    ranks = chain((position.rank,), range(1, len(position.token_ids)))
    return {
        token_id: Logprob(value, rank, None if texts is None else texts[token_id])
        for token_id, value, rank in zip(position.token_ids, position.values, ranks, strict=False)
    }


class FlatLogprobs(Sequence[Any]):
    """Reads like `list[dict[int, Logprob] | None]` but stores four flat lists, so the garbage
    collector has no object per entry to track.

    Position i owns entries `[start_indices[i], end_indices[i])` of the flat lists; an empty range
    reads as an empty dict (the first prompt position). It only grows, at its end.
    """

    def __init__(self) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []

    def append(self, row: Row | None) -> None:
        """Add one position."""
        self.start_indices.append(len(self.token_ids))
        for token_id, entry in (row or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def append_position(self, position: PositionLogprobs, texts: TokenTexts | None) -> None:
        """Add one position without creating a dict for it."""
        self.start_indices.append(len(self.token_ids))
        ids = position.token_ids
        repeated = ids[0] in ids[1:]
        # a dict keeps only the later entry of the chosen token, and so does this
        first = 1 if repeated else 0
        self.token_ids += ids[first:]
        self.logprobs += position.values[first:]
        self.ranks += [*range(1, len(ids))] if repeated else [position.rank, *range(1, len(ids))]
        self.decoded_tokens += [
            None if texts is None else texts[token_id] for token_id in ids[first:]
        ]
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            part = FlatLogprobs()
            for position in range(*index.indices(len(self))):
                part.append(self[position])
            return part
        start = self.start_indices[index]
        end = self.end_indices[index]
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in range(start, end)
        }
