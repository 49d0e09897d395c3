"""What a plugin's class tells: whether it fits the interface of its kind, and the spec if it has no
package (`pegboard.plugins.uninstalled`)."""

from __future__ import annotations

import inspect
from dataclasses import fields
from functools import partial
from importlib import import_module
from typing import Any

from pegboard.errors import PluginBroken, did_you_mean
from pegboard.installed import Entry
from pegboard.interfaces import KINDS
from pegboard.interfaces.spec import Spec


def class_spec(entry: Entry, implementation: object, expected: type[Spec]) -> Spec:
    """Return the spec of the class `implementation`, of the type `expected`. The class attribute
    `spec_fields` holds fields of the kind's spec as a mapping. A flag of the kind is also set if
    the class has an attribute of that name that is True. Raises PluginBroken."""
    kind = KINDS[entry.kind]
    spec_fields: Any = getattr(implementation, "spec_fields", {})
    known = {item.name for item in fields(expected)} - {"api", "implementation", "replaces"}
    if not isinstance(implementation, type):
        reason = f"is a {type(implementation).__name__}, expected a class"
    elif not isinstance(spec_fields, dict):
        reason = (
            f"has spec_fields = {spec_fields!r}, expected a mapping of fields of "
            f"{expected.__name__}"
        )
    elif unknown := sorted(set(spec_fields) - known):
        reason = (
            f"has the unknown field {unknown[0]!r} in spec_fields{did_you_mean(unknown[0], known)}"
        )
    elif entry.kind == "logits_processor" and (
        hasattr(implementation, "update_state") or hasattr(implementation, "is_argmax_invariant")
    ):
        reason = (
            "has the methods of vLLM's logits processors (update_state, is_argmax_invariant). "
            "Pegboard's has update, apply and argmax_invariant: see docs/vllm.md"
        )
    elif wrong := misfit(entry.kind, "implementation", implementation):
        reason = wrong
    else:
        class_flags = {
            flag for flag in expected.FLAGS if getattr(implementation, flag, False) is True
        }
        try:
            flags = class_flags.union(spec_fields.get("flags", ()))
            fitting = {
                **spec_fields,
                "api": f"{kind.major}.{kind.minor}",
                "implementation": entry.value,
                "flags": frozenset(flags),
            }
            return expected(**fitting)
        except (TypeError, ValueError) as error:
            reason = f"makes no {expected.__name__}: {error}"
    raise PluginBroken(f"{entry.id}: {entry.value!r} {reason}", plugin=entry.id)


def interface_of(kind: str, part: str) -> tuple[Any, list[str]]:
    """Return the Protocol that a part of a spec ("implementation", "worker") has to fulfil, and the
    methods that it needs, or (None, []) if the kind has none. The Protocol's name begins like that
    of the spec."""
    module, _, spec = KINDS[kind].spec.partition(":")
    values = vars(import_module(module)).items()
    interfaces = [
        value
        for name, value in values
        if name.startswith(spec[:-4]) and getattr(value, "_is_protocol", False)
    ]
    interface = dict(zip(("implementation", "worker"), interfaces, strict=False)).get(part)
    members = vars(interface).items() if interface else ()
    return interface, [
        name
        for name, value in members
        if name[0] != "_" and callable(getattr(value, "__func__", value))
    ]


def misfit(kind: str, part: str, target: Any) -> str:
    """Return why a plugin's object does not fit its interface: what it lacks, or how a method must
    be callable. Return "" if it fits. Of a class, only missing members are reported, unless the
    constructor can assign it."""
    interface, methods = interface_of(kind, part)
    optional = () if getattr(target, "host_tokens", False) else ("extend",)
    names = [
        *methods,
        *(
            name
            for name in getattr(interface, "__annotations__", ())
            if not hasattr(interface, name)
        ),
    ]
    assigned = (
        target.__init__.__code__.co_names
        if inspect.isclass(target) and inspect.isfunction(target.__init__)
        else ()
    )
    lacks = [
        name for name in names if not hasattr(target, name) and name not in (*optional, *assigned)
    ]
    if lacks:
        return f"has no {', '.join(lacks)}, which {interface.__module__}.{interface.__name__} needs"
    for name in () if inspect.isclass(target) else filter(partial(hasattr, target), methods):
        declared = inspect.signature(getattr(interface, name))
        needed = [
            one
            for word, one in declared.parameters.items()
            if word != "self" and one.default is one.empty
        ]
        plain = [one for one in needed if one.kind is not one.KEYWORD_ONLY]
        try:
            signature = inspect.signature(getattr(target, name))
        except (TypeError, ValueError):
            continue  # it is not a function of Python
        try:
            signature.bind(*plain, **{one.name: one for one in needed if one not in plain})
        except TypeError as error:
            return f"has {name}{signature}, and it is called as {name}{declared}: {error}"
    return ""
