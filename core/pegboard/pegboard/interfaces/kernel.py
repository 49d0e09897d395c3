"""Kind `kernel` (provisional): fast versions of what the layers compute.

The entry-point name is "<name>.<implementation>", where <name> is one of:

an op             a function of `pegboard.ops.OPS`, or one that a plugin declares for its own models
a weight format   a class of `pegboard.ops.WEIGHT_FORMATS`, which holds and multiplies a matrix
a recorder        any name, with the flag `recorder`: a class that records the forward
                  (`pegboard.interfaces.platform.Replay`), if the platform cannot record it
"""

from __future__ import annotations

from dataclasses import dataclass

from pegboard.interfaces.spec import BATCH_INVARIANT, Need, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec(Spec):
    """supports: `dtype` (of activations).

    An op is a function with the signature of its reference. A weight format is a class with the
    methods of its reference. A recorder is a class that is built without arguments. flags:
    "recorder" = it is one. "batch_invariant": see `spec.BATCH_INVARIANT`. declares: True if the op
    or weight format is new. This implementation then defines its meaning, and all others are
    compared with it. Only one plugin may declare a name, and none may declare a name that core
    declares.
    """

    FLAGS = frozenset({"recorder", BATCH_INVARIANT})

    declares: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNeed(Need):
    dtype: str | None = None


RECORDER = "recorder"
"""Key under which the kernel that records the forward is chosen. All other kernels are chosen by op
or weight format."""


def key_of(name: str, spec: KernelSpec) -> str:
    """Return the key under which the entry called `name` is chosen: its op, its weight format, or
    RECORDER."""
    return RECORDER if "recorder" in spec.flags else name.partition(".")[0]
