"""Kind `draft` (provisional): proposes tokens that the model then verifies in one step (speculative
decoding). Runs in W. The *target* is the model whose tokens are proposed. A proposer may have a
model of its own, the *draft model*."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.interfaces.spec import Need, Spec

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from torch import Tensor

    from pegboard.config.limits import Limits
    from pegboard.interfaces.weight_loader import Checkpoint


@dataclass(frozen=True, slots=True)
class DraftSource:
    """checkpoint: what the draft model is built from. taps: the depths of the target at which it
    gets hidden states: before the layer with this index, or after the last one; () = the hidden
    states that the target's `logits` gets. num_drafts: how many tokens the model was made to
    propose; None = any number."""

    checkpoint: "Checkpoint"
    taps: tuple[int, ...] = ()
    num_drafts: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec(Spec):
    """supports: `max_drafts` (AtMost); `architecture` (a set, or True = any), of checkpoints for
    which this method is chosen if the user has named no method.

    source: path of a function that is called in A, as source(checkpoint of the target, checkpoint
    that the user has named or None). It returns a DraftSource, and raises ModelError if they do not
    fit. None = the proposer has no model.

    flags: "stores" = the draft model stores keys and values, of drafts too. "padded" = the proposer
    is a `PaddedProposer`."""

    FLAGS = frozenset({"stores", "padded"})

    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNeed(Need):
    max_drafts: int | None = None
    architecture: str | None = None


class Forwards(Protocol):
    """Computes with the draft model, for the running requests: with their tokens and their blocks
    of the KV cache.

    model: the module that the plugin of kind `model` has made, which is bound. Its calls through
    this class are replayed if they could be recorded. can_wait: a token may be computed some steps
    later, because its block is not given back before the request ends.
    """

    model: Any
    can_wait: bool

    def room(self, rows: "np.ndarray") -> "np.ndarray":
        """Return [B], how many tokens of each row have slots in the KV cache."""

    def tokens(
        self,
        rows: "np.ndarray",
        starts: "np.ndarray",
        counts: "np.ndarray",
        hidden: "Tensor | None" = None,
        *,
        ahead: int = 0,
        exact: "Tensor | None" = None,
        ids: "tuple[Tensor, Tensor] | None" = None,
    ) -> "Tensor":
        """Compute the tokens at positions starts[i] … starts[i] + counts[i] − 1 of rows [B], all of
        which are known, and return the hidden states [T, size] of the draft model. ahead: the token
        that is embedded at a position is the one so many positions later. hidden: [T, width], given
        to the model with the tokens. The result is valid until the next call.

        exact: [B], the first positions, if only the device knows them; `starts` are then the
        largest that they can be. ids: places [n] among the tokens, and the ids [n] that are there,
        which only the device knows."""

    def next(
        self,
        rows: "np.ndarray",
        positions: "np.ndarray",
        token_ids: "Tensor",
        hidden: "Tensor | None" = None,
        *,
        exact: "Tensor | None" = None,
    ) -> "tuple[Tensor, Tensor]":
        """Compute one token for each of rows [B], with these ids [B] at these positions [B], and
        return the hidden states [B, size] and the logits [B, V]. They are valid until the next
        call. exact: see `tokens`."""

    def after(self, token_ids: "Tensor", hidden: "Tensor | None" = None) -> "tuple[Tensor, Tensor]":
        """Do the same for the rows of the last call of `next`, which had `exact`, each one position
        later. Nothing is copied to the device. The positions of `next` must be the largest that
        those of the last call can be."""

    def logits(self, hidden: "Tensor") -> "Tensor":
        """Return the logits [B, V] of these hidden states [B, size]."""


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """is_adaptive: a proposer that is seldom right should propose less. fixed_tokens: see
    `Device.fixed_tokens`. forwards: None = the proposer has no model. draw: draws drafts, as
    `DrawsDrafts.draw_drafts` of the sampler; None = the sampler cannot verify drafts that were
    drawn. measures: the proposals may depend on the times of steps, because no other rank must
    make the same."""

    limits: "Limits"
    is_adaptive: bool = True
    fixed_tokens: float = 1.0
    forwards: Forwards | None = None
    draw: "Callable[[Tensor, np.ndarray], tuple[Tensor, Tensor | None]] | None" = None
    measures: bool = False


@dataclass(slots=True)
class ComputedTokens:
    """The tokens that the target has computed in a step, without drafts that were wrong. rows: [B],
    all rows of the step. starts: [B], the first position of each. counts: [B]. hidden: the target's
    states of these tokens, [sum of counts, size] for each depth of `DraftSource.taps`, or one.
    samples: [B], whether a token was sampled, which is not among them."""

    rows: "np.ndarray"
    starts: "np.ndarray"
    counts: "np.ndarray"
    samples: "np.ndarray"
    hidden: "tuple[Tensor, ...]"


@dataclass(slots=True)
class DraftStep:
    """rows: [S], the rows that may draft: those that have a new token. history: one host array of
    token ids per row. max_drafts: [S], the limit of each row. num_verified: [S], how many drafts
    the step has verified. num_new: [S], how many tokens it has added to the history: the drafts
    that were right, and one more. num_tokens: what the step has computed, in all rows. seconds:
    how long it took until its tokens were known. computed: set for proposers with a model."""

    rows: "np.ndarray"
    history: "list[np.ndarray]"
    max_drafts: "np.ndarray"
    num_verified: "np.ndarray"
    num_new: "np.ndarray"
    num_tokens: int = 0
    seconds: float = 0.0
    computed: ComputedTokens | None = None


@dataclass(slots=True)
class Drafts:
    """token_ids: at most max_drafts[i] proposals for each row; an empty array is allowed. probs:
    [number of proposals, V], see `SampleStep.draft_probs`."""

    token_ids: "list[np.ndarray]"
    probs: "Tensor | None" = None


class DraftProposer(Protocol):
    def add(self, row: int, token_ids: "np.ndarray") -> None:
        """A request in this row starts or resumes. token_ids: the prompt and the outputs so far."""

    def remove(self, rows: "np.ndarray") -> None:
        """These rows are free now. Nobody has changed their blocks in the KV cache yet."""

    def propose(self, step: DraftStep) -> Drafts:
        """Return proposals for the next step. Called at the end of every step that has sampled
        tokens, and at the end of every other step if the proposer has a model: hot."""


@dataclass(slots=True)
class PaddedStep:
    """The tokens that the target has computed in a step, with drafts that were wrong: how many were
    is known on the device alone. The slots of wrong ones are overwritten later, so a draft model
    may compute them too.

    rows: [B], all rows of the step. starts: [B], the first position of each, if all drafts before
    were right. counts: [B], tokens of each, T in all. samples: [B], whether a token was sampled,
    for S of the rows. depths: how many drafts each of these gets. hidden: as in `ComputedTokens`.

    On the device, int64: exact [B], the first positions. places [N]: of the tokens from which one
    was sampled, among the T. token_ids [N]: these samples. They are right up to the newest one of
    each row. last [S]: the place of the last token before the newest one. newest [S]: its id. ends
    [S]: its position."""

    rows: "np.ndarray"
    starts: "np.ndarray"
    counts: "np.ndarray"
    samples: "np.ndarray"
    depths: int
    hidden: "tuple[Tensor, ...]"
    exact: "Tensor"
    places: "Tensor"
    token_ids: "Tensor"
    last: "Tensor"
    newest: "Tensor"
    ends: "Tensor"


class PaddedProposer(DraftProposer, Protocol):
    """A proposer with a model that also proposes without knowing on the host which tokens were
    sampled. On a device with separate memory, the next step can then be scheduled before this one
    is done."""

    def propose_padded(self, step: PaddedStep) -> "tuple[Tensor, Tensor | None]":
        """Return drafts [S, n] on the device, with n ≤ depths, and the probabilities [S, n, V] with
        which they were drawn; None = without chance. Called at the end of every step, instead of
        `propose`. Nothing may wait for the device."""


class DraftModel(Protocol):
    """An addition to the Model, for models that get hidden states of the target. Such a model sets
    `build.declared.given` to the width of what it is given with each token. `embed` gets that
    [T, width] after the ids, and what `forward` returns is given with the next token.
    `build.target` is the target's module, whose embedding and head may be shared."""

    def start(self, *hidden: "Tensor") -> "Tensor":
        """Return what is given with a token [T, width], from the target's states of the token
        before, [T, size] for each tap."""
