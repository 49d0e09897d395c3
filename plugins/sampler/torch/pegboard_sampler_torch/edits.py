"""Changes to single logits: allowed_token_ids, bad_words, min_tokens and logit_bias, for the rows
that use them.

They change only a few logits of a few rows. Each row adds to lists of indices, and one scatter
applies them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from pegboard.data.sampling_params import SamplingParams
from pegboard_sampler_torch.upload import Upload

ANY = -2
"""Where a draft may be any token."""
_NO_IDS = np.zeros(0, np.int64)


@dataclass(slots=True)
class Edits:
    """The edits of one row. allowed: int64 ids on the device, or None. forbidden: ids of one-token
    bad words. words: longer bad words. stop_ids: forbidden before `min_tokens` outputs. bias_ids,
    bias: ids and values of logit_bias. outputs: the row's output tokens so far, kept only for
    `words`."""

    allowed: Tensor | None = None
    forbidden: np.ndarray = field(default_factory=lambda: _NO_IDS)
    words: list[list[int]] = field(default_factory=list)
    stop_ids: np.ndarray = field(default_factory=lambda: _NO_IDS)
    min_tokens: int = 0
    bias_ids: np.ndarray = field(default_factory=lambda: _NO_IDS)
    bias: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    outputs: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls, params: SamplingParams, outputs: np.ndarray, vocab_size: int, upload: Upload
    ) -> "Edits | None":
        """Return the edits that `params` asks for, or None. outputs: [n] tokens generated before
        the row was started or resumed."""
        edits = cls()
        if params.allowed_token_ids is not None:
            edits.allowed = upload(_inside(params.allowed_token_ids, vocab_size))
        words = [word for word in params.bad_words_token_ids if word]
        edits.forbidden = _inside([word[0] for word in words if len(word) == 1], vocab_size)
        edits.words = [word for word in words if len(word) > 1 and 0 <= word[-1] < vocab_size]
        if len(outputs) < params.min_tokens:
            edits.stop_ids = _inside(sorted(params.all_stop_token_ids), vocab_size)
            edits.min_tokens = params.min_tokens
        if params.logit_bias:
            inside = {
                int(token): value
                for token, value in params.logit_bias.items()
                if 0 <= int(token) < vocab_size
            }
            edits.bias_ids = np.fromiter(inside, np.int64, len(inside))
            edits.bias = np.fromiter(inside.values(), np.float32, len(inside))
        if edits.words:
            edits.outputs = outputs.tolist()
        return None if edits.is_done(len(outputs)) else edits

    def is_done(self, num_outputs: int) -> bool:
        """True if none of the edits can have an effect any more."""
        lasting = (
            len(self.forbidden) or len(self.bias_ids) or self.words or self.allowed is not None
        )
        return not lasting and (num_outputs >= self.min_tokens or not len(self.stop_ids))

    def forbidden_now(self, num_outputs: int) -> list[np.ndarray]:
        """Return the ids that must not come next, after `num_outputs` tokens and drafts. `words`
        have others."""
        parts = [self.forbidden]
        if num_outputs < self.min_tokens:
            parts.append(self.stop_ids)
        return [part for part in parts if len(part)]

    def ends_after(self, depth: int) -> Iterator[tuple[int, list[int]]]:
        """Return the ends of words that `outputs` and `depth` drafts may begin: the last token, and
        what the last drafts must be."""
        for word in self.words:
            *begin, end = word
            start = max(0, len(begin) - depth)
            at = len(self.outputs) - start
            if at >= 0 and self.outputs[at:] == begin[:start]:
                yield end, begin[start:]


def apply_edits(
    logits: Tensor,
    places: Sequence[tuple[int, Edits, int, int]],
    drafts: Callable[[], Tensor],
    upload: Upload,
) -> None:
    """Edit contiguous logits [N, V] in place. places: (logits row, edits, number of outputs, number
    of drafts before it). drafts: returns the drafts before each logits row [N, most drafts], which
    may be known on the device only."""
    vocab_size = logits.shape[-1]
    forbidden = []
    biased = []
    bias = []
    ends: list[tuple[int, int]] = []
    begins: list[tuple[int, list[int]]] = []
    for place, edits, num_outputs, depth in places:
        if edits.allowed is not None:
            kept = logits[place].index_select(0, edits.allowed)
            logits[place].fill_(float("-inf")).index_copy_(0, edits.allowed, kept)
        now = edits.forbidden_now(num_outputs + depth)
        forbidden += [ids + place * vocab_size for ids in now]
        for end, begin in edits.ends_after(depth):
            if begin:
                ends.append((place, end))
                begins.append((depth - len(begin), begin))
            else:
                forbidden.append(np.array([end + place * vocab_size]))
        if len(edits.bias_ids):
            biased.append(edits.bias_ids + place * vocab_size)
            bias.append(edits.bias)
    flat = logits.view(-1)
    if forbidden:
        flat.index_fill_(0, upload(np.concatenate(forbidden)), float("-inf"))
    if ends:
        _forbid_after(logits, ends, begins, drafts(), upload)
    if biased:
        index = upload(np.concatenate(biased))
        flat.index_add_(0, index, upload(np.concatenate(bias)))


def _forbid_after(
    logits: Tensor,
    ends: Sequence[tuple[int, int]],
    begins: Sequence[tuple[int, list[int]]],
    drafts: Tensor,
    upload: Upload,
) -> None:
    """Forbid tokens where drafts [N, most] are what they must be. ends: (logits row, token).
    begins: for each of them, (first column, drafts from there on)."""
    wanted = np.full((len(ends), drafts.shape[1]), ANY)
    for row, (first, begin) in enumerate(begins):
        wanted[row, first : first + len(begin)] = begin
    places, ids = np.array(ends).T
    expected = upload(wanted)
    is_begun = ((expected == ANY) | (drafts[upload(places)] == expected)).all(1)
    values = logits.new_full((len(ends),), float("inf"))
    values.masked_fill_(is_begun, float("-inf"))
    index = upload(ids + places * logits.shape[-1])
    logits.view(-1).scatter_reduce_(0, index, values, "amin")


def _inside(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Return the distinct ids that are in the vocabulary, int64."""
    unique = np.unique(np.asarray(ids, np.int64))
    return unique[(unique >= 0) & (unique < vocab_size)]
