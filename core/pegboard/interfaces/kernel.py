"""Kind `kernel` (provisional): a fast version of one op of `pegboard.ops`. Entry-point name "<op>.<implementation>"."""

from __future__ import annotations

from dataclasses import dataclass

from pegboard.interfaces.spec import Need, Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec(Spec):
    """`implementation` names a function with the op's exact signature (see the reference in `pegboard.ops`).
    symbol: C entry for recorded programs. fuses: op sequence this kernel replaces in a program."""

    symbol: str | None = None
    fuses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNeed(Need):
    op: str | None = None
    dtype: str | None = None
