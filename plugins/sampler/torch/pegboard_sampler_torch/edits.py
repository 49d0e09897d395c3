"""Changes to single logits: allowed_token_ids, bad_words, min_tokens and logit_bias, for the rows
that use them.

They change only a few logits of a few rows. Each row adds to lists of indices, and one scatter
applies them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from pegboard.data.sampling_params import SamplingParams
from pegboard_sampler_torch.upload import Upload

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

    def forbidden_now(self, num_outputs: int, drafts: Sequence[int]) -> list[np.ndarray]:
        """Return the ids that must not come next, after `num_outputs` tokens and then `drafts`."""
        parts = [self.forbidden]
        if num_outputs + len(drafts) < self.min_tokens:
            parts.append(self.stop_ids)
        if self.words:
            longest = max(map(len, self.words)) - 1
            recent = [*self.outputs[-longest:], *drafts]
            ends = [word[-1] for word in self.words if recent[-(len(word) - 1) :] == word[:-1]]
            parts.append(np.array(ends, np.int64))
        return [part for part in parts if len(part)]


def apply_edits(
    logits: Tensor, places: Sequence[tuple[int, Edits, int, Sequence[int]]], upload: Upload
) -> None:
    """Edit contiguous logits [N, V] in place. places: (logits row, edits, number of outputs, drafts
    before it)."""
    vocab_size = logits.shape[-1]
    forbidden = []
    biased = []
    bias = []
    for place, edits, num_outputs, drafts in places:
        if edits.allowed is not None:
            kept = logits[place].index_select(0, edits.allowed)
            logits[place].fill_(float("-inf")).index_copy_(0, edits.allowed, kept)
        forbidden += [ids + place * vocab_size for ids in edits.forbidden_now(num_outputs, drafts)]
        if len(edits.bias_ids):
            biased.append(edits.bias_ids + place * vocab_size)
            bias.append(edits.bias)
    flat = logits.view(-1)
    if forbidden:
        flat.index_fill_(0, upload(np.concatenate(forbidden)), float("-inf"))
    if biased:
        index = upload(np.concatenate(biased))
        flat.index_add_(0, index, upload(np.concatenate(bias)))


def _inside(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Return the distinct ids that are in the vocabulary, int64."""
    unique = np.unique(np.asarray(ids, np.int64))
    return unique[(unique >= 0) & (unique < vocab_size)]
