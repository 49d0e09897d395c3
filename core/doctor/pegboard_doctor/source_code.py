"""Reads what a plugin's class defines from its source, without importing it: the class may need
torch, or a device."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from pegboard.plugins.class_specs import interface_of

OPTIONAL = {"logits_processor": {"extend"}}
"""Methods of an interface that not every plugin of the kind needs."""

PLAIN_BASES = {"object", "ABC", "Protocol", "Generic", "NamedTuple", "nn.Module", "torch.nn.Module"}
"""Bases that define no method of an interface."""

Found = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | str | None
"""What a module calls a name: a definition, "module:name" from where it is imported, or None for
any other value."""


def wanted(kind: str, part: str) -> tuple[str, list[str]]:
    """Return the interface that a part of a spec ("implementation", "worker") has to fulfil, and
    the methods that it needs, or ("", []) if the kind has none."""
    interface, methods = interface_of(kind, part)
    if interface is None:
        return "", []
    return f"{interface.__module__}.{interface.__name__}", [
        word for word in methods if word not in OPTIONAL.get(kind, ())
    ]


def missing(kind: str, part: str, path: str) -> str:
    """Return what is wrong with the class "module:Class" that a spec names as one of its parts: it
    does not exist, or lacks methods of its interface. Return "" if nothing is wrong, or if that
    cannot be read from the source."""
    module, _, name = path.partition(":")
    names = _names(module)
    if not names.keys() & {name.partition(".")[0], "*", "__getattr__"}:
        return f"there is no {name} in {module}"
    defined = members(module, name)
    if defined is None:
        return ""
    interface, methods = wanted(kind, part)
    lacks = [word for word in methods if word not in defined]
    return f"has no {', '.join(lacks)}, which {interface} needs" if lacks else ""


def members(module: str, name: str) -> set[str] | None:
    """Return the names that a class and its bases define, also those assigned to `self`. Return
    None if the source of one of them cannot be read, or if the name is not a class."""
    definition = _names(module).get(name)
    if isinstance(definition, str):
        return members(*definition.split(":"))
    if not isinstance(definition, ast.ClassDef):
        return None
    names = {
        node.name
        for node in definition.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for node in ast.walk(definition):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    for base in definition.bases:
        if ast.unparse(base).partition("[")[0] in PLAIN_BASES:
            continue
        inherited = members(module, base.id) if isinstance(base, ast.Name) else None
        if inherited is None:
            return None
        names |= inherited
    return None if "__getattr__" in names else names


@cache
def _names(module: str) -> dict[str, Found]:
    """Return the top-level names of a module. "*" or "__getattr__" is one of them if there may be
    more."""
    path = _file(module)
    if path is None:
        return {"*": None}
    tree = ast.parse(path.read_text("utf-8"), str(path))
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names: dict[str, Found] = {}
    for node in ast.walk(tree):  # also below `if` and `try`; an inner name does no harm
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.setdefault(node.name, node)
        elif isinstance(node, ast.ImportFrom):
            parents = (
                package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            )
            source = ".".join(filter(None, [*parents, node.module]))
            names |= {alias.asname or alias.name: f"{source}:{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {(alias.asname or alias.name).partition(".")[0]: None for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.id)
    return names


def _file(module: str) -> Path | None:
    """Return the source file of a module, found without importing its package."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    if not rest:
        return Path(spec.origin)
    place = Path(spec.origin).parent.joinpath(*rest)
    return next(
        (path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None
    )
