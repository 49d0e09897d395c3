"""Kind `kernel` (provisional): fast versions of what the layers compute. Entry-point name "<name>.<implementation>", where <name>
says what it is:

an op              a function of `pegboard.ops.OPS`, or one that a plugin declares for its own models
a weight format    a class of `pegboard.ops.WEIGHT_FORMATS`: how a matrix is held and multiplied with
a replay           a class that records the forward (`pegboard.interfaces.platform.Replay`), for a platform that cannot itself
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pegboard.interfaces.spec import Need, Spec

Provides = Literal["op", "weight_format", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec(Spec):
    """supports: `dtype` (of activations).

    provides: what `implementation` is. An op: a function with the signature of its reference. A weight format: a class with the
    methods of its reference. A replay: a class that is built without arguments.
    declares: the op or weight format is a new one, and this implementation its meaning, with which all others are compared. One
    plugin declares it; nobody declares again what core declares.
    """

    provides: Provides = "op"
    declares: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNeed(Need):
    dtype: str | None = None
