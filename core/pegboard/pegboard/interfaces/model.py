"""Kind `model`: an architecture, built from `pegboard.layers`. Keyed by the Hugging Face
architecture name. The name `*` takes any architecture and ranks after every exact name. Runs in
W."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.interfaces.spec import BATCH_INVARIANT, Spec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Another checkpoint that a model is made of. reference: as a user types it. prefix: what the
    names of its tensors begin with in the whole model."""

    reference: str
    prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(Spec):
    """Entry-point name: the architecture's name, as checkpoints write it.

    parts: path of a function that returns the other checkpoints that a config names, as {key:
    ModelPart}. If the config lacks such a key, the part's config is put there, and its tensors into
    the index. Called in A. None = there are none.

    flags: "encoder" = tokens attend to those after them, too. A prompt is computed in one step,
    nothing is cached, and the model makes vectors and no text. "classifier" = `logits` returns one
    number for each class, of rows that the pooler made. "token_classifier" = in addition, these
    rows are the states of tokens. "tensor_parallel" = ranks can divide its layers. "multimodal" =
    it is a `MultiModal`. "encoder_decoder" = it is an `EncoderDecoder`, and each prompt has one
    item, which it encodes. "whole_items" = the tokens of an item attend to all of it, so no step
    computes only the first part of it. An item with other tokens between its rows counts as
    several. "whole_prompt" = the tokens of a prompt attend to all of it. The layers of both are
    built with `Build.sees_items`. "batch_invariant" = so is all that it computes itself, if its
    layers are (see `spec.BATCH_INVARIANT`).
    """

    FLAGS = frozenset(
        {
            "encoder",
            "classifier",
            "token_classifier",
            "tensor_parallel",
            "multimodal",
            "encoder_decoder",
            "whole_items",
            "whole_prompt",
            BATCH_INVARIANT,
        }
    )
    parts: str | None = None


class Model(Protocol):
    """One architecture family in one file: a `torch.nn.Module` that is built as `Model(config,
    build)`.

    The constructor declares layers through `build` and allocates no weights. A layer asks for its
    checkpoint tensors by path: a layer built at `build.at("model").at("layers").at(3)…` reads
    `model.layers.3.….weight`.
    """

    def __init__(self, config: Mapping[str, Any], build: Any) -> None:
        """config: the checkpoint's configuration, in Hugging Face's form. build: a
        `pegboard.layers.Build`."""

    def embed(self, input_ids: "Tensor") -> "Tensor":
        """Embed the tokens: [T] ids → [T, hidden]. If the constructor has appended names to
        `build.declared.inputs`, one int64 [T] follows for each of them, in that order. It is 0 for
        tokens whose request has no such numbers, and that of the prompt's last token for tokens
        after the prompt. "token_types": 1 in the second of two texts."""

    def forward(self, hidden: "Tensor", positions: "Tensor") -> "Tensor":
        """Apply the layers and the final norm: [T, hidden], [T] → [T, hidden]. If the constructor
        has appended names to `build.declared.axes`, there is one [T] for each of them. The
        rows are those of `embed`, or were given with the prompt. The call is recorded and replayed
        as a whole, so it must not synchronize with the host or branch on the values of tensors."""

    def logits(self, hidden: "Tensor") -> "Tensor":
        """Compute the logits of the rows that need them: [N, hidden] → [N, V] float32."""


class MultiModal(Protocol):
    """An addition to the Model: it reads images, audio or video."""

    def encode(self, modality: str, items: "Sequence[Mapping[str, Tensor]]") -> "Sequence[Tensor]":
        """Return the rows of each item: [n, width of the rows of `embed`]. items: the arrays that
        the processor made of each, on the model's device. Rows do not depend on which items are
        encoded together."""


class EncoderDecoder(MultiModal, Protocol):
    """An addition to the Model: its layers attend to what its encoder makes of an item. They
    declare attention with `encoder_tokens`."""

    def store_encoded(self, rows: "Tensor") -> None:
        """Store the keys and values of an item's rows [n, width], which `encode` made: call the
        attention of every such layer with them. The queries do not matter."""
