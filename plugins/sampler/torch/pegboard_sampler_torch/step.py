"""The layout of one step: which row each logits row belongs to, at which depth, and which features
the step uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from pegboard.interfaces.sampler import SampleStep
from pegboard_sampler_torch.rows import Feature, Rows


class StepLayout:
    """rows: int64 [B]. owner: int64 [N], index into `rows`. row_of, depth: int64 [N]. flags: int32
    [N], the features of each logits row. present: all features of the step. has_holes: masks or
    edits set logits to −inf. All of these are on the host. The properties copy them to the device
    when needed."""

    def __init__(self, step: SampleStep, rows: Rows, device: torch.device) -> None:
        self.device = device
        self.to_device = rows.upload
        self.rows = step.rows.astype(np.int64)
        self.offsets = step.offsets.astype(np.int64)
        self.num_places = int(self.offsets[-1])
        self.has_drafts = self.num_places > len(self.rows)
        self._draft_token_ids = step.draft_token_ids
        self.draft_probs = step.draft_probs
        if self.has_drafts:
            self.owner = np.repeat(np.arange(len(self.rows)), np.diff(self.offsets))
            self.depth = np.arange(self.num_places) - self.offsets[self.owner]
            self.row_of = self.rows[self.owner]
        else:
            self.owner = np.arange(len(self.rows))
            self.depth = np.zeros(len(self.rows), np.int64)
            self.row_of = self.rows
        self.flags = rows.flags[self.row_of]
        self.present = int(np.bitwise_or.reduce(self.flags, initial=0))
        self.has_holes = step.masks is not None or bool(self.present & Feature.EDITS)

    def places(self, feature: int) -> np.ndarray:
        """Return the logits rows that use `feature`, int64."""
        return np.flatnonzero(self.flags & feature)

    @cached_property
    def row_tensor(self) -> Tensor:
        return self.to_device(self.row_of)

    @cached_property
    def depth_tensor(self) -> Tensor:
        return self.to_device(self.depth)

    @cached_property
    def offsets_tensor(self) -> Tensor:
        return self.to_device(self.offsets)

    @cached_property
    def flat_drafts(self) -> Tensor:
        """int64 [N − B] on the device."""
        assert self._draft_token_ids is not None, "logits rows for drafts, but no draft_token_ids"
        return self._draft_token_ids.to(self.device, torch.int64)

    @cached_property
    def drafts(self) -> Tensor:
        """int64 [B, most drafts] on the device, −1 after the end."""
        return pad_drafts(self.flat_drafts, self.offsets, self.to_device)

    @cached_property
    def drafts_before(self) -> Tensor:
        """The drafts before each logits row: int64 [N, most drafts] on the device, −1 elsewhere."""
        column = torch.arange(self.drafts.shape[1], device=self.device)
        later = column >= self.depth_tensor.unsqueeze(-1)
        return self.drafts[self.to_device(self.owner)].masked_fill_(later, -1)

    @cached_property
    def host_drafts(self) -> list[list[int]]:
        """The drafts of each of `rows`, without padding."""
        if not self.has_drafts:
            return [[]] * len(self.rows)
        lengths = (np.diff(self.offsets) - 1).tolist()
        return [drafts[:n] for drafts, n in zip(self.drafts.tolist(), lengths, strict=True)]

    def host_drafts_before(self, places: np.ndarray | None = None) -> list[list[int]]:
        """Return the drafts before each of these logits rows; None = all of them."""
        owner, depth = (
            each if places is None else each[places] for each in (self.owner, self.depth)
        )
        return [
            self.host_drafts[i][:n] for i, n in zip(owner.tolist(), depth.tolist(), strict=True)
        ]


def pad_drafts(
    draft_token_ids: Tensor, offsets: np.ndarray, to_device: Callable[[np.ndarray], Tensor]
) -> Tensor:
    """Pad ragged drafts [N − B] to int64 [B, most drafts], with −1 after the end. Request i has the
    logits rows offsets[i] … offsets[i + 1] − 1 (offsets [B + 1]): one per draft, and a last one for
    the token after all drafts. to_device: copies an array without waiting."""
    lengths = np.diff(offsets) - 1
    most = int(lengths.max(initial=0))
    if (lengths == most).all():
        return draft_token_ids.view(len(lengths), most)
    column = np.arange(most)
    places = (offsets[:-1] - np.arange(len(lengths)))[:, None] + column
    places[column >= lengths[:, None]] = -1
    index = to_device(places)
    padded = draft_token_ids[index.clamp(min=0)]
    return padded.masked_fill_(index < 0, -1)
