"""Kind `pooler` (provisional): makes vectors of prompts, or values of classes. It plans where the
model is resolved, and computes in W."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pegboard.interfaces.spec import Spec

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from pegboard.data.pooling_params import Pooling, PoolingParams
    from pegboard.interfaces.platform import Copies
    from pegboard.interfaces.tokenizer import Vocabulary
    from pegboard.interfaces.weight_loader import Checkpoint

Convert = Literal["embed", "classify"]
"""What a model of text makes when its head for text is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerSpec(Spec):
    """plan: "module:fn" with `fn(PoolerFacts) -> Pooling`. It must not import torch. Raises
    ModelError for files that ask for something else, ConfigError for a wrong `pooler_config`."""

    plan: str


@dataclass(frozen=True, slots=True)
class PoolerFacts:
    """flags: of the model's spec. config: the setting `pooler_config`, which wins over what the
    checkpoint's files say. convert: what a model of text is to make; None = the model makes vectors
    or classes itself, as its flags say. sees_all: its tokens attend to those after them, too, so
    core computes a prompt in one step."""

    flags: frozenset[str]
    checkpoint: "Checkpoint"
    config: Mapping[str, Any]
    convert: Convert | None = None
    sees_all: bool = False


@dataclass(frozen=True, slots=True)
class PoolerSetup:
    """pooling: what the plugin has planned. copies: from and to a device with separate memory; None
    if there is none. A pooler that copies with them never waits. vocabulary: reads the tokenizer's
    vocabulary, which takes time; None = there is none."""

    pooling: "Pooling"
    copies: "Copies | None" = None
    vocabulary: "Callable[[], Vocabulary] | None" = None


@dataclass(slots=True)
class PoolStep:
    """The prompts of a step, R of them, S of which end in it. rows: int32 [R], on the host: the
    number of each request, which it keeps until it ends or `remove` names it. offsets: int64 [R],
    on the host: how many tokens of each prompt were computed before. 0 = the prompt begins, perhaps
    once more. starts: int32 [R + 1], on the host: prompt i has the tokens from starts[i] to
    starts[i + 1] of the step. starts_on_device: the same. ends: bool [R], on the host: the prompt
    ends in this step. last: int64 [S], on the device: the places of the last tokens of the prompts
    that end; None = each token is the last one of its prompt. token_ids: int64 [T], on the host.
    params: of each of the R prompts; with no task, `Pooling.task` is meant. classify: states [n,
    size] → values of the classes [n, C], which are valid until the next call. All of them are valid
    until `pool` returns."""

    rows: "np.ndarray"
    offsets: "np.ndarray"
    starts: "np.ndarray"
    starts_on_device: "Tensor"
    ends: "np.ndarray"
    last: "Tensor | None"
    token_ids: "np.ndarray"
    params: "Sequence[PoolingParams]"
    classify: "Callable[[Tensor], Tensor]"


class Pooler(Protocol):
    """A prompt may be computed in several steps. If the tasks of `Pooling.from_start` need what the
    steps before made, the pooler keeps it by row."""

    def pool(self, hidden: "Tensor", step: PoolStep) -> "Callable[[], list[np.ndarray]]":
        """Compute the result of each prompt that ends in this step, also of steps in which none
        does. hidden: [T, size], the final states of the step's tokens, which the next step may
        overwrite. The returned callable waits, and returns a list of float32 arrays, one for each
        of these prompts: a vector, or for tasks of tokens a matrix. It may be called after the next
        steps have run, and is called in the order of the steps. Hot."""

    def remove(self, rows: "np.ndarray") -> None:
        """The requests have left these rows [n]: forget what was kept of them."""
