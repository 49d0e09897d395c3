"""What the model computes in a step. A stage is replayed if it was recorded; otherwise it is
called.

token ids ─ embed → rows ─ forward → hidden ─ logits → logits
└──── decode, verify: a token per request, and drafts ┘
                    └─ any step ──┘         └ of the rows that need a token

A prompt may contain such rows instead of token ids. A step with them is like any other. Later
pipeline stages get rows from the stage before them instead of token ids (see `borders`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pegboard.errors import expect
from pegboard.interfaces.platform import Replay, Trait
from pegboard.layers import Build
from pegboard.layers.classes import ClassHead
from pegboard.worker.context import Rows
from pegboard.worker.recordings import Recorded, Recordings, Run
from pegboard.worker.step_inputs import InputBuilder, StepInputs

TRAITS: tuple[Trait, ...] = ("forward", "verify", "decode", "logits")


class Entrance(Protocol):
    """Where the rows of a step come from. tensors: what the model embeds, in buffers that keep
    their addresses."""

    tensors: Sequence[Tensor]

    def one(self) -> Tensor:
        """Return one row [1, width], which says the width and the dtype of all of them."""

    def rows(self, inputs: StepInputs) -> Tensor:
        """Return the rows of a step [T, width], which are valid until the next step."""


class Embed:
    """Embeds the ids of the tokens. given: [most tokens of a step, width], what the model gets with
    each of them; None = nothing."""

    def __init__(self, model: Any, inputs: InputBuilder, given: Tensor | None = None) -> None:
        self._model = model
        self._given = () if given is None else (given,)
        ids = [each.on_device for each in inputs.to_embed]
        self.tensors: Sequence[Tensor] = [*ids, *self._given]

    def one(self) -> Tensor:
        embedded = self._model.embed(*(each[:1] for each in self.tensors))
        return expect(embedded, Tensor, self._model, "embed")

    def rows(self, inputs: StepInputs) -> Tensor:
        given = [each[: len(inputs.to_embed[0])] for each in self._given]
        rows: Tensor = self._model.embed(*inputs.to_embed, *given)
        return rows


class Stages:
    """The stages of one bound model. entrance: where the rows of a step come from. shared: how
    ranks share them out. traits, max_drafts: see `Recordings`. classes: takes the place of the
    model's logits; None = nothing does. taps: the hidden states of the last
    step at the depths `build.taps`, in that order, [T, size]. They are valid until the next
    step."""

    def __init__(
        self,
        model: Any,
        build: Build,
        inputs: InputBuilder,
        entrance: Entrance,
        shared: Rows,
        traits: Sequence[Trait] = TRAITS,
        max_drafts: int = 0,
        classes: ClassHead | None = None,
    ) -> None:
        self.model = model
        self.classes = classes
        self.build = build
        self.inputs = inputs
        self.entrance = entrance
        self.shared = shared
        self.taps: Sequence[Tensor] = ()
        self.recordings = Recordings(inputs, traits, max_drafts, build.declared.eager)
        self.embedded = self.hidden = torch.empty(0)
        self.form = torch.empty(0, 0)
        """[0, size], of the last step's hidden states. They may differ from the embeddings."""

    @torch.inference_mode()
    def record(
        self,
        replay: Replay,
        traits: Sequence[Trait],
        plan: Callable[[StepInputs], None] | None,
        unrecorded: Callable[[Trait], str],
    ) -> None:
        """Record those of these stages that can be recorded, after a first step. See
        `Recordings.record`."""
        if not self.form.shape[1]:
            return  # the first step has not used this model, so no step will
        model = self.model
        inputs = self.inputs
        embedded = self.entrance.tensors
        positions = [each.on_device for each in inputs.to_place]
        if "logits" in traits:
            self.hidden = self.form.new_zeros(inputs.max_rows, self.form.shape[1])
        if "forward" in traits and "forward" in self.recordings.traits:
            one = self.entrance.one()
            most = max(replay.sizes("forward", inputs.max_tokens), default=0)
            self.embedded = one.new_zeros(most, one.shape[1])

        def decode(*given: Tensor) -> tuple[Tensor, ...]:
            rows = model.embed(*given[: len(embedded)])
            hidden = model.forward(rows, *given[len(embedded) :])
            return hidden, self._computed(hidden), *self._tapped()

        runs: Mapping[Trait, tuple[Run, Sequence[Tensor]]] = {
            "forward": (
                lambda rows, *positions: (model.forward(rows, *positions), *self._tapped()),
                [self.embedded, *positions],
            ),
            "decode": (decode, [*embedded, *positions]),
            "verify": (decode, [*embedded, *positions]),
            "logits": (lambda rows: (self._computed(rows),), [self.hidden]),
        }
        runs = {trait: runs[trait] for trait in traits}
        with_adapters = (False,) if self.build.lora is None else (False, True)
        self.recordings.record(replay, runs, with_adapters, plan, unrecorded)

    def decode(self, recorded: Recorded, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the hidden states [T, size] after the final norm, and their logits."""
        hidden, logits, *taps = recorded.recording(num_tokens)
        self.taps = [each.clone() for each in taps]  # the next recording overwrites them
        return hidden, logits

    def forward(
        self,
        recorded: Recorded | None,
        inputs: StepInputs,
        given: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return the hidden states [T, size] after the final norm. given: places [G] and rows [G,
        width] that replace embeddings."""
        rows = self.entrance.rows(inputs)
        if given is not None:
            rows = rows.index_copy(0, given[0], given[1].to(rows.dtype))
        if recorded is None:
            hidden = self.shared.compute(self.model.forward, rows, *inputs.positions)
            self.form = expect(hidden, Tensor, self.model, "forward")[:0]
            self.taps = self._tapped()
            return hidden
        self.embedded[: len(rows)].copy_(rows)
        hidden, *taps = recorded.recording(inputs.num_tokens)
        self.taps = [each.clone() for each in taps]
        return hidden

    def _tapped(self) -> tuple[Tensor, ...]:
        taps = self.build.declared.taps
        return tuple(taps[depth] for depth in self.build.taps)

    def _computed(self, hidden: Tensor) -> Tensor:
        logits: Tensor = (self.classes or self.model).logits(hidden)
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, vocabulary] of these rows [N, size], or the values of classes. They
        are valid until the next call."""
        recorded = self.recordings.find("logits", len(hidden))
        if recorded is None:
            self.form = hidden[:0]
            return self._computed(hidden)
        self.hidden[: len(hidden)].copy_(hidden)
        return recorded.recording(len(hidden))[0]
