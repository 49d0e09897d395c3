"""What serves plugins that were made for the major version before. Each class is built with a
plugin's object, which it keeps as `plugin_object` for messages, and fulfils today's interface
(`Kind.earlier`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from pegboard.data.pooling_params import PoolingParams
    from pegboard.interfaces.pooler import PoolStep


@dataclass(slots=True)
class PoolStepV2:
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


class PoolerV2(Protocol):
    def pool(self, hidden: "Tensor", step: PoolStepV2) -> "Callable[[], list[np.ndarray]]":
        """Compute a vector for each prompt that ends. hidden: [T, size], the final states of the
        step's tokens, which the next step may overwrite. The returned callable waits, and returns
        one float32 vector for each prompt. Hot."""


class PoolerOfV2:
    """In v2, `pool` learns only of prompts that end in the step, so nothing is kept of a row."""

    def __init__(self, plugin: PoolerV2) -> None:
        self.plugin_object = plugin

    def remove(self, rows: "np.ndarray") -> None:
        """See `pegboard.interfaces.pooler.Pooler.remove`."""

    def pool(self, hidden: "Tensor", step: "PoolStep") -> "Callable[[], list[np.ndarray]]":
        """See `pegboard.interfaces.pooler.Pooler.pool`."""
        params = [each for each, ends in zip(step.params, step.ends, strict=True) if ends]
        if not params:
            return list
        starts = step.starts[: len(params) + 1]
        on_device = step.starts_on_device[: len(params) + 1]
        old = PoolStepV2(starts, on_device, step.last, params, step.classify)
        return self.plugin_object.pool(hidden, old)
