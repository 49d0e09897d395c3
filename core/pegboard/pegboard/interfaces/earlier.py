"""What serves plugins that were made for the major version before. Each class is built with a
plugin's object, which it keeps as `plugin_object` for messages, and fulfils today's interface
(`Kind.earlier`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from pegboard.interfaces.pooler import PoolStep


class PoolerV1(Protocol):
    def pool(self, hidden: "Tensor", step: "PoolStep") -> "list[np.ndarray]":
        """Return one float32 vector for each prompt. hidden: [T, size], the final states of the
        step's tokens. Hot."""


class PoolerOfV1:
    """In v1, `pool` waits for the device, and returns the vectors themselves."""

    def __init__(self, plugin: PoolerV1) -> None:
        self.plugin_object = plugin

    def pool(self, hidden: "Tensor", step: "PoolStep") -> "Callable[[], list[np.ndarray]]":
        """See `pegboard.interfaces.pooler.Pooler.pool`."""
        vectors = self.plugin_object.pool(hidden, step)
        return lambda: vectors
