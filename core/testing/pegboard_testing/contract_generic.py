"""Checks that hold for every plugin of every kind. A plugin's test is one line per entry:

    from pegboard_testing.contract_generic import check_entry, installed_entry

    def test_contract() -> None:
        check_entry(installed_entry("attention", "triton"))

The checks raise AssertionError, which names the plugin. Options, probe and implementation are
imported here. The spec is imported in a new interpreter, because this one has already imported too
much.
"""

from __future__ import annotations

import inspect
from importlib.resources import files
from typing import Any

from pegboard.installed import Entry
from pegboard.interfaces.kernel import KernelSpec
from pegboard.interfaces.model_family import ModelFamilySpec
from pegboard.interfaces.spec import TIERS, Absent, Broken, Ok, Spec
from pegboard.plugins import discovery, options
from pegboard.plugins.importing import import_part, import_spec, incompatibility, probe_facts
from pegboard_doctor.doctor import BUDGET_MS, PARTS, Cost, measure
from pegboard_doctor.source_code import members, missing, wanted
from pegboard_testing.contract_source import check_signatures


def installed_entry(kind: str, name: str, distribution: str | None = None) -> Entry:
    """Return the installed entry, found as the engine finds it."""
    entries = [
        entry
        for entry in discovery.scan().entries
        if (entry.kind, entry.name) == (kind, name) and distribution in (None, entry.distribution)
    ]
    assert entries, (
        f"{kind}:{name} is not installed: is its entry point in pyproject.toml, and the package "
        "installed?"
    )
    assert len(entries) == 1, (
        f"{kind}:{name} is provided by {', '.join(entry.distribution for entry in entries)}: name "
        "one of them"
    )
    return entries[0]


def check_entry(entry: Entry, cost: Cost | None = None) -> None:
    """Run all generic checks on one entry. cost: of its spec's import, if it has been measured
    (`measure`)."""
    check_metadata(entry)
    check_spec_import(entry, cost)
    spec = import_spec(entry)
    check_spec(entry, spec)
    check_parts(entry, spec)
    check_signatures(entry, spec)
    check_options(entry, spec)
    check_probe(entry, spec)


def check_metadata(entry: Entry) -> None:
    """The entry is found through installed metadata, in a group that this core serves."""
    assert entry in discovery.scan().entries, f"{entry.id} is not found through installed metadata"
    assert ":" in entry.value, (
        f"{entry.id}: the entry point is {entry.value!r}, expected module:OBJECT"
    )


def check_spec_import(entry: Entry, cost: Cost | None = None) -> None:
    """The spec's module is light, and importing it has no side effects."""
    cost = cost or measure([entry])[entry]
    assert not cost.error, cost.error
    assert not cost.heavy, (
        f"{entry.id}: the spec's module imports {', '.join(cost.heavy)}; name heavy parts as "
        "strings"
    )
    best_ms = cost.ms
    for _ in range(4):  # a busy machine is only sometimes slow; a heavy module is always slow
        if best_ms > BUDGET_MS:
            best_ms = min(best_ms, measure([entry])[entry].ms)
    assert best_ms <= BUDGET_MS, (
        f"{entry.id}: the spec's module takes {best_ms:.1f} ms to import, budget {BUDGET_MS:.0f} ms"
    )
    assert not cost.effects, (
        f"{entry.id}: importing the spec's module changes {', '.join(cost.effects)}"
    )


def check_spec(entry: Entry, spec: Spec) -> None:
    """The spec's own fields are valid."""
    reason = incompatibility(entry, spec)
    assert reason is None, f"{entry.id}: {reason}"
    assert spec.tier in TIERS, f"{entry.id}: tier {spec.tier!r} is not one of {', '.join(TIERS)}"
    for field in ("platforms", "flags"):
        value = getattr(spec, field)
        fits = value is None or isinstance(value, frozenset)
        assert fits, f"{entry.id}: {field} is a {type(value).__name__}, expected a frozenset"
    for qualified in spec.replaces:
        assert ":" in qualified, f'{entry.id}: replaces {qualified!r}, expected "distribution:name"'


def check_parts(entry: Entry, spec: Spec) -> None:
    """Every "module:name" string names something that is callable, and classes have the methods of
    their interface."""
    for part in PARTS:
        path = getattr(spec, part, None)  # not every kind has all of these fields
        if path is None or (path == "" and isinstance(spec, ModelFamilySpec)):
            continue
        assert ":" in path, f"{entry.id}: {part} is {path!r}, expected module:NAME"
        make = import_part(entry, path, part)
        assert callable(make), (
            f"{entry.id}: {part} {path!r} is a {type(make).__name__}, expected a class or function"
        )
        if part in ("probe", "suits", "validate", "parts"):
            assert _takes(make, 1), f"{entry.id}: {part} {path!r} must take exactly one argument"
        check_methods(entry, part, path, make)
    if isinstance(spec, ModelFamilySpec):
        check_family(entry, spec)
        return
    implementation = import_part(entry, spec.implementation, "implementation")
    # A Protocol class says nothing useful about its constructor, and a kernel is a function with
    # the op's signature.
    is_op = isinstance(spec, KernelSpec)  # a kernel takes the op's arguments
    if inspect.isclass(implementation) and not inspect.isabstract(implementation) and not is_op:
        assert _takes(implementation, 2), (
            f"{entry.id}: {spec.implementation!r} must be built as Implementation(options, setup)"
        )


def check_methods(entry: Entry, part: str, path: str, make: Any) -> None:
    """A class has the methods of its interface. Those that are only assigned to `self` are found in
    its source."""
    wrong = missing(entry.kind, part, path)
    assert not wrong, f"{entry.id}: {part} {path!r} {wrong}"
    if inspect.isclass(make) and members(*path.split(":")) is None:
        interface, methods = wanted(entry.kind, part)
        lacks = [
            name for name in methods if not hasattr(make, name) and not hasattr(make, "__getattr__")
        ]
        assert not lacks, (
            f"{entry.id}: {part} {path!r} has no {', '.join(lacks)}, which {interface} needs"
        )


def check_family(entry: Entry, spec: ModelFamilySpec) -> None:
    """A family is data. It names what it is matched on, it recommends existing kinds of plugin, and
    its template exists."""
    assert spec.model_types or spec.architectures or spec.template_markers, (
        f"{entry.id}: the family names nothing to match"
    )
    wrong = [
        kind
        for kind in spec.recommends
        if kind not in ("tokenizer", "tool_parser", "reasoning_parser")
    ]
    assert not wrong, (
        f"{entry.id}: recommends {wrong[0]!r}, expected tokenizer, tool_parser or reasoning_parser"
    )
    if spec.chat_template is not None:
        package, colon, name = spec.chat_template.partition(":")
        assert colon, f"{entry.id}: chat_template is {spec.chat_template!r}, expected package:file"
        assert files(package).joinpath(name).is_file(), (
            f"{entry.id}: chat_template {spec.chat_template!r} is not there"
        )


def check_options(entry: Entry, spec: Spec) -> None:
    """Options are a frozen pydantic model that forbids unknown keys. If no field is required, the
    model is valid without any value."""
    if spec.options is None:
        return
    from pydantic import BaseModel

    model = import_part(entry, spec.options, "options")
    assert inspect.isclass(model) and issubclass(model, BaseModel), (
        f"{entry.id}: {spec.options!r} is not a pydantic model"
    )
    assert model.model_config.get("frozen") is True, f"{entry.id}: {spec.options!r} must be frozen"
    assert model.model_config.get("extra") == "forbid", (
        f"{entry.id}: {spec.options!r} must forbid unknown keys (extra='forbid')"
    )
    assert options.schema_text(entry), entry.id
    if any(info.is_required() for info in model.model_fields.values()):
        return
    # pydantic does not validate defaults, so a wrong default would be noticed only when a user sets
    # the same value
    values: dict[str, Any] = {name: getattr(model(), name) for name in model.model_fields}
    assert model.model_validate(values) == model(), (
        f"{entry.id}: the defaults of {spec.options!r} do not validate"
    )


def check_probe(entry: Entry, spec: Spec) -> None:
    """The probe gives a verdict on this machine, and a reason if the verdict is not ok."""
    if spec.probe is None:
        return
    verdict = import_part(entry, spec.probe, "probe")(probe_facts())
    assert isinstance(verdict, Ok | Absent | Broken), (
        f"{entry.id}: the probe returned {verdict!r}, expected Ok, Absent or Broken"
    )
    assert isinstance(verdict, Ok) or verdict.reason, f"{entry.id}: the probe gives no reason"


def _takes(function: Any, count: int) -> bool:
    try:
        inspect.signature(function).bind(*([None] * count))
    except TypeError:
        return False
    except ValueError:  # implemented in C, without a signature
        return True
    return True
