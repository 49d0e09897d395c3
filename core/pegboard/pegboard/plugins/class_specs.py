"""Makes the spec of a plugin that is a class without a package (`pegboard.plugins.uninstalled`)."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pegboard.errors import PluginBroken, did_you_mean
from pegboard.interfaces import KINDS
from pegboard.interfaces.spec import Spec
from pegboard.plugins.discovery import Entry


def class_spec(entry: Entry, made: object, expected: type[Spec]) -> Spec:
    """Return the spec of the class `made`, of the type `expected`. The class attribute `spec_fields` holds fields of the kind's
    spec as a mapping. A flag of the kind is also set if the class has an attribute of that name that is True. Raises
    PluginBroken."""
    kind = KINDS[entry.kind]
    given: Any = getattr(made, "spec_fields", {})
    known = {item.name for item in fields(expected)} - {"api", "implementation", "replaces"}
    if not isinstance(made, type):
        reason = f"is a {type(made).__name__}, expected a class"
    elif not isinstance(given, dict):
        reason = f"has spec_fields = {given!r}, expected a mapping of fields of {expected.__name__}"
    elif unknown := sorted(set(given) - known):
        reason = f"has the unknown field {unknown[0]!r} in spec_fields{did_you_mean(unknown[0], known)}"
    elif entry.kind == "logits_processor" and (why := _not_a_processor(made)):
        reason = why
    else:
        own = {flag for flag in expected.FLAGS if getattr(made, flag, False) is True}
        try:
            flags = own.union(given.get("flags", ()))
            fitting = {**given, "api": f"{kind.major}.{kind.minor}", "implementation": entry.value, "flags": frozenset(flags)}
            return expected(**fitting)
        except (TypeError, ValueError) as error:
            reason = f"makes no {expected.__name__}: {error}"
    raise PluginBroken(f"{entry.id}: {entry.value!r} {reason}", plugin=entry.id)


def _not_a_processor(made: type) -> str | None:
    """Return why a class cannot be a logits processor, or None if it can."""
    if hasattr(made, "update_state") or hasattr(made, "is_argmax_invariant"):
        return (
            "has the methods of vLLM's logits processors (update_state, is_argmax_invariant). Pegboard's has update, apply and "
            "argmax_invariant: see docs/vllm.md"
        )
    missing = [name for name in ("update", "apply", "argmax_invariant") if not hasattr(made, name)]
    if getattr(made, "host_tokens", False) and not hasattr(made, "extend"):
        missing.append("extend")
    return f"has no {', '.join(missing)}: see pegboard.interfaces.logits_processor" if missing else None
