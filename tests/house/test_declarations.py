"""Every declaration has code that reads it."""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

import pytest
from declarations import (
    called_on_workers,
    fields,
    flag_words,
    flags_read,
    is_read,
    is_set,
    product_files,
    public_methods,
    strings_of,
    uses,
)
from members import CORE, text_of, tree_of

from pegboard.engine.actions import ACTIONS
from pegboard.errors import PluginBroken
from pegboard.interfaces import KINDS
from pegboard.plugins.importing import import_object, import_spec
from pegboard_testing.fake_distributions import FakeDistributions, spec_source

WORKER = CORE / "worker/worker.py"

EXCEPTIONS = {
    "BuiltinToolNeed.type": "`pegboard plugins why builtin_tool --need type=…` asks with it",
    "EngineRequest.client": "Request.of copies it with all others, and Grammars reads it there",
    "EngineConfig.structured_outputs_config": "read by a function of its own file, which checks it",
    "EngineConfig.enable_eplb": "read by `eplb_config` of its own file",
    "EngineConfig.eplb_config": "read by a function of its own file, which checks it",
    "EPLBConfig.policy": "has one value, which is checked",
    "EPLBConfig.use_async": "has one value, which is checked",
    "ModelFamilySpec.implementation": "gives a default to the field of Spec: a family is data",
    ("StructuredOutputNeed.constraint"): (
        "`pegboard plugins why structured_output --need constraint=…` asks with it"
    ),
    "StepTimes.prepare_s": "a part of StepTimes.total_s, which is read",
}
"""Fields that no other file of the product reads or sets → why they stay."""


def check(what: str, found: set[Any]) -> None:
    assert not found, f"{what}: {', '.join(sorted(map(str, found)))}"


def unread() -> set[str]:
    return {str(field) for field in fields() if not is_read(field)} - set(EXCEPTIONS)


def unset() -> set[str]:
    """Fields that are read and never set. Users set settings, and plugins set specs. A field of a
    need counts as read where it is set."""
    optional = [
        field
        for field in fields()
        if field.has_default and not field.owner.endswith(("Spec", "Config", "Need"))
    ]
    return {str(field) for field in optional if is_read(field) and not is_set(field)} - set(
        EXCEPTIONS
    )


def uncalled_methods() -> set[str]:
    callers = [
        path
        for path in product_files()
        if path != WORKER and ("executor" in str(path) or "/engine/" in str(path))
    ]
    called = {name for path in callers for name in uses(path).read | strings_of(path)}
    return set(public_methods(WORKER, "Worker")) - called


def missing_methods() -> set[str]:
    return set(called_on_workers()) - set(public_methods(WORKER, "Worker"))


def unasked_actions() -> set[str]:
    """The actions that no code outside the engine asks for, by tag or by class."""
    asked = set()
    for path in product_files():
        if CORE / "engine" not in path.parents:
            asked |= strings_of(path)
            if "pegboard.engine.actions" in text_of(path):
                asked |= {node.id for node in ast.walk(tree_of(path)) if isinstance(node, ast.Name)}
    return {tag for tag, action in ACTIONS.items() if not {tag, action.__name__} & asked}


def test_every_field_is_read() -> None:
    check("declared and read by no other file", unread())


def test_every_field_with_a_default_is_set() -> None:
    check("read and never set", unset())


def test_every_flag_is_looked_for() -> None:
    unread_flags = {pair for pair in flag_words() if pair[1] not in flags_read()}
    assert not unread_flags, f"flags that nothing looks for: {sorted(unread_flags)}"


@pytest.mark.parametrize("field", ["flags", "supports"])
def test_unknown_words_in_a_spec_are_refused(
    field: str, fake_distributions: FakeDistributions
) -> None:
    """Every kind refuses unknown words when the spec is loaded."""
    wrong = {"flags": frozenset({"quikc"}), "supports": {"quikc": True}}[field]
    for kind in KINDS:
        module = f"acme_{kind}_{field}"
        spec = import_object(KINDS[kind].spec)
        needed = {
            one.name: "x:Y"
            for one in dataclasses.fields(spec)
            if one.default is one.default_factory is dataclasses.MISSING
        }
        source = spec_source(kind, **{**needed, "api": "1.0", field: wrong})
        fake_distributions.add(module, {kind: {"mine": f"{module}:SPEC"}}, {module: source})
    entries = fake_distributions.scan().entries
    assert {entry.kind for entry in entries} == set(KINDS)
    for entry in entries:
        with pytest.raises(
            PluginBroken, match=f"{field} has 'quikc', which {entry.kind} does not know"
        ):
            import_spec(entry)


def test_every_method_of_the_worker_is_called() -> None:
    check("methods that nothing calls", uncalled_methods())


def test_what_is_called_on_workers_is_there() -> None:
    check("not methods of the worker", missing_methods())


def test_every_control_action_is_asked_for() -> None:
    check("control actions that nothing asks for", unasked_actions())


def test_lists_hold_what_is_so() -> None:
    """Entries that are no longer true must be removed, so that the list only shrinks."""
    idle = {str(field) for field in fields() if not is_read(field) or not is_set(field)}
    gone = set(EXCEPTIONS) - idle
    assert not gone, f"no longer so, remove from the lists: {', '.join(sorted(map(str, gone)))}"


def test_something_is_looked_at() -> None:
    """The search finds the known declarations."""
    assert len(fields()) > 300
    names = {str(field) for field in fields()}
    assert {
        "Spec.tier",
        "Limits.max_num_seqs",
        "Batch.rows",
        "ServerConfig.port",
        "AttentionSetup.layers",
    } <= names
    assert sum(is_read(field) for field in fields()) > 250
