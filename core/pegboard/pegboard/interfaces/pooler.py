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
    or classes itself, as its flags say."""

    flags: frozenset[str]
    checkpoint: "Checkpoint"
    config: Mapping[str, Any]
    convert: Convert | None = None


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
    """The prompts that end in a step, S of them. starts: int32 [S + 1], on the host: with
    `Pooling.whole_prompts`, prompt i has the tokens from starts[i] to starts[i + 1].
    starts_on_device: the same. last: int64 [S], on the device: the place of each prompt's last
    token; None = the tokens are the last ones of the prompts. params: of each prompt. classify:
    pooled states [S, size] → values of the classes [S, C]. All of them are valid until `pool`
    returns."""

    starts: "np.ndarray"
    starts_on_device: "Tensor"
    last: "Tensor | None"
    params: "Sequence[PoolingParams]"
    classify: "Callable[[Tensor], Tensor]"


class Pooler(Protocol):
    def pool(self, hidden: "Tensor", step: PoolStep) -> "Callable[[], list[np.ndarray]]":
        """Compute a vector for each prompt. hidden: [T, size], the final states of the step's
        tokens, which the next step may overwrite. The returned callable waits, and returns one
        float32 vector for each prompt. It may be called after the next steps have run. Hot."""
