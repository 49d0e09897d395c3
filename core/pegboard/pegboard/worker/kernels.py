"""Which implementation of every op this rank computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pegboard.interfaces.kernel import KernelNeed
from pegboard.log import get_logger
from pegboard.ops import REFERENCES
from pegboard.plugins.registry import Registry

log = get_logger(__name__)

OPTIONAL = ("program", "sample_tokens")
"""Only there when a plugin provides them: a layer walks its own path without a program, a sampler draws by itself."""


def choose_kernels(registry: Registry, *, platform: str, dtype: str) -> Mapping[str, Callable[..., Any]]:
    """Op name → callable: the best suitable plugin of the `kernel` kind, else core's reference. Those of `OPTIONAL` are
    left out when no plugin provides them."""
    chosen: dict[str, Callable[..., Any]] = dict(REFERENCES)
    for op in (*REFERENCES, *OPTIONAL):
        entries = [entry for entry in registry.entries("kernel") if entry.name.partition(".")[0] == op]
        if entries:
            need = KernelNeed(platform=platform, dtype=dtype)
            decision = registry.choose("kernel", need, key=op, among=entries, required=False)
            log.debug("%s", decision.line())
            if decision.winner is not None:
                chosen[op] = registry.load(decision.winner)
    return chosen
