"""Checks of a plugin's source: which modules it imports, and whether its methods take what the
interface passes."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pegboard.installed import Entry
from pegboard.interfaces.spec import Spec
from pegboard.plugins import discovery
from pegboard.plugins.importing import import_part
from pegboard_doctor.source_code import wanted

PUBLIC = frozenset({"interfaces", "layers", "ops", "data", "errors", "log", "env"})
"""The modules of `pegboard` that plugins may import. From `pegboard` itself they may import every
name."""
SHARED = frozenset({"pegboard_models", "pegboard_server", "pegboard_weights"})
"""Packages that provide plugins and may be imported by others: see docs/plugins.md."""


def check_imports(entry: Entry) -> None:
    """The plugin imports the public modules of Pegboard only, no private name, and no other
    plugin."""
    package = _top(entry.value)
    plugins = {_top(other.value): other.distribution for other in discovery.scan().entries}
    spec = find_spec(package)
    roots = spec.submodule_search_locations if spec is not None else None
    assert roots, f"{entry.id}: the package {package} has no folder, so its source cannot be read"
    for path in sorted(path for root in roots for path in Path(root).rglob("*.py")):
        for line, module, name in imports(path):
            where = f"{entry.id}: {path}:{line} imports {module}{f'.{name}' if name else ''}"
            top, *rest = module.split(".")
            if top == "pegboard" and rest:
                assert rest[0] in PUBLIC, (
                    f"{where}; plugins may import pegboard.{{{', '.join(sorted(PUBLIC))}}}"
                )
            if top.startswith("pegboard") and top != package:
                private = [word for word in (*rest, name) if word.startswith("_")]
                assert not private, f"{where}; {private[0]} is private"
                other = plugins.get(top, entry.distribution)
                assert other == entry.distribution or top in SHARED, (
                    f"{where} of the plugin package {other}"
                )


def _top(path: str) -> str:
    return path.partition(":")[0].partition(".")[0]


def imports(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line, module, name) for every import in a file, also of those below `if` and in
    functions. name: "" for `import module`. Relative imports are left out."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ""
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for alias in node.names:
                yield node.lineno, node.module, alias.name


def check_signatures(entry: Entry, spec: Spec) -> None:
    """The methods of the plugin's classes take the arguments that the interface passes. A method
    that is a coroutine in the interface is one in the plugin."""
    for part in ("implementation", "worker"):
        path = getattr(spec, part, None)
        part_class = import_part(entry, path, part) if path else None
        if not inspect.isclass(part_class):
            continue
        interface, methods = wanted(entry.kind, part)
        module, _, name = interface.rpartition(".")
        for method in methods:
            reason = difference(
                vars(getattr(import_module(module), name))[method],
                inspect.getattr_static(part_class, method, None),
            )
            assert not reason, f"{entry.id}: {part} {path!r}: {method} {reason}, see {interface}"


def difference(declared: Any, given: Any) -> str:
    """Return why a method cannot be called as the interface declares it, or "". What is not a plain
    function is not judged."""
    if not inspect.isfunction(declared) or not inspect.isfunction(given):
        return ""
    if inspect.iscoroutinefunction(declared) != inspect.iscoroutinefunction(given):
        return "must be async" if inspect.iscoroutinefunction(declared) else "must not be async"
    parameters = list(inspect.signature(declared).parameters.values())
    plain = [
        one.name
        for one in parameters
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    named = {one.name: None for one in parameters if one.kind is one.KEYWORD_ONLY}
    try:
        inspect.signature(given).bind(*plain, **named)
    except TypeError as error:
        return (
            f"takes {inspect.signature(given)}, and is called with {inspect.signature(declared)}: "
            f"{error}"
        )
    return ""
