"""A plugin's spec. Only the standard library is imported here, and a module that holds specs must
import in 20 ms.

A plugin's entry point (group `pegboard.<kind>.v1`) names a frozen `<Kind>Spec` object. The object
holds what selection needs as data, and *strings* that name everything heavy. Only the strings of a
chosen plugin are imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

Tier = Literal["vendor", "tuned", "portable", "reference"]
TIERS: tuple[Tier, ...] = ("vendor", "tuned", "portable", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Base of every `<Kind>Spec`.

    api: lowest minor version of the interface that the plugin needs, "1.0".
    implementation: "module:Class", built as `Class(options, setup)`. It is imported only if the
    plugin is chosen. options: "module:Options", a frozen pydantic model that forbids unknown keys.
    None means that the plugin has no options, and
        the implementation gets None.
    probe: "module:fn" with `fn(ProbeFacts) -> Ok | Absent | Broken`. It must not raise and must not
    import torch. suits: "module:fn" with `fn(need) -> list[str]`, the reasons why it is not
    suitable. Asked after `supports`. platforms: device families that it runs on; None = any.
    tier: rank class, vendor > tuned > portable > reference.
    supports: compared with the kind's Need key by key, see `unmet`.
    flags: words from the kind's closed list, `FLAGS`. A word, or a key of `supports`, that the kind
    does not know is an error. BATCH_INVARIANT, of the kinds that compute: see there.
    replaces: qualified names ("distribution:name") of plugins that it wants to replace. The
    operator must also set `override`.
    """

    api: str
    implementation: str
    options: str | None = None
    probe: str | None = None
    suits: str | None = None
    platforms: frozenset[str] | None = None
    tier: Tier = "portable"
    supports: Mapping[str, object] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()
    replaces: tuple[str, ...] = ()

    FLAGS: ClassVar[frozenset[str]] = frozenset()


BATCH_INVARIANT = "batch_invariant"
"""The flag of a plugin whose result for a token has the same bits in every batch: it depends on the
token and on the tokens before it in its request, and on no other request, on no order of requests,
and not on how the prompt was cut into steps or what of it was cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What selection asks of a plugin. A kind that asks for more has a `<Kind>Need`. A field that
    is None or False asks for nothing. batch_invariant: the plugin must have the flag."""

    platform: str | None = None
    batch_invariant: bool = False

    def wants(self) -> dict[str, Any]:
        """Return the fields that ask for something of `Spec.supports`: all but `platform`, which is
        compared with `Spec.platforms`, and `batch_invariant`, which is compared with
        `Spec.flags`."""
        values = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("platform", BATCH_INVARIANT)
        }
        return {
            name: value
            for name, value in values.items()
            if value is not None and value is not False
        }


@dataclass(frozen=True, slots=True)
class Multiple:
    """In `supports`: the wanted integer must be a multiple of `of`."""

    of: int


@dataclass(frozen=True, slots=True)
class AtMost:
    """In `supports`: the wanted number must not exceed `limit`."""

    limit: float


def unmet(supports: Mapping[str, object], wants: Mapping[str, object]) -> list[str]:
    """Return the reasons why `supports` does not cover `wants`; an empty list means suitable.

    A set means "one of", `True` means "can" (or any value), `Multiple` and `AtMost` compare
    numbers, and any other value must be equal. A wanted key that is not declared is not supported.
    """
    reasons = []
    for key, value in wants.items():
        declared = supports.get(key)
        if declared is None or declared is False:
            reasons.append(f"{key}={value!r} is not declared as supported")
        elif isinstance(declared, Multiple):
            if not isinstance(value, int) or value % declared.of:
                reasons.append(f"{key} {value!r} is not a multiple of {declared.of}")
        elif isinstance(declared, AtMost):
            if not isinstance(value, int | float) or value > declared.limit:
                reasons.append(f"{key} {value!r} is over {declared.limit}")
        elif isinstance(declared, set | frozenset | tuple | list):
            if value not in declared:
                reasons.append(
                    f"{key} {value!r} not in {{{', '.join(sorted(map(str, declared)))}}}"
                )
        elif declared is not True and declared != value:
            reasons.append(f"{key} {value!r} is not {declared!r}")
    return reasons


@dataclass(frozen=True, slots=True)
class ProbeFacts:
    """The facts that a probe may use. They are collected without touching a device."""

    machine: str
    cpu_flags: frozenset[str] = frozenset()
    num_cpus: int = 1


@dataclass(frozen=True, slots=True)
class Ok:
    """The plugin can work on this machine. facts: recorded with the decision and shown."""

    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Absent:
    """Something that the plugin needs is not on this machine: a device, an optional library. Not
    reported as a problem."""

    reason: str


@dataclass(frozen=True, slots=True)
class Broken:
    """Something that the plugin needs is on this machine but cannot be used: an old driver, a
    damaged library. Reported as a problem."""

    reason: str


Verdict = Ok | Absent | Broken
