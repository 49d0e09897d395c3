"""Generates the pages about the kinds of plugin from the interfaces: the list `docs/kinds.md`, one
page for each kind in `docs/kinds`, and `docs/stability.md`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from pegboard.interfaces import HOOKS_GROUP, KINDS, Kind, hooks
from pegboard.interfaces.spec import Need, Spec
from pegboard.plugins.defaults import catalogue, default_enabled, default_name
from pegboard_doctor.changes import SETTINGS
from pegboard_testing.authoring.catalogue import REPOSITORY
from pegboard_testing.authoring.conformance import CONTRACTS
from pegboard_testing.authoring.page_text import GENERATED, cell, first_sentence, joined

CHOSEN = {
    "one": "one, by name or rank",
    "keyed": "the key it is named after",
    "capability": "need and rank",
    "chain": "configured order",
    "set": "every enabled one",
}
"""`Kind.chosen` → text."""

GUIDES = {
    "quantization": "quantization_methods.md",
    "reasoning_parser": "parsers.md",
    "tool_parser": "parsers.md",
}
"""Kind → the page in docs/ that explains how to write a plugin of it."""

DOCS = REPOSITORY / "docs"
FOLDER = DOCS / "kinds"

INTRODUCTION = """\
Every kind of plugin, from `pegboard.interfaces.KINDS`. Processes: A = API server, E = engine, W = worker. *Provisional*: the
interface may still change inside its major version ([stability](stability.md)). *Ambient*: acts by being present, so it runs only
when enabled. How to write a plugin: [plugins.md](plugins.md)."""  # noqa: E501


# --- docs/kinds.md --------------------------------------------------------------------------------


def kinds_page() -> str:
    """Return the list of all kinds."""
    rows = [
        f"| [`{kind.name}`](kinds/{kind.name}.md) | `{kind.group}` | {CHOSEN[kind.chosen]} | "
        f"{' '.join(kind.roles)} | {_marks(kind)} | {kind.summary} |"
        for kind in KINDS.values()
    ]
    table = _table("kind", "entry-point group", "chosen by", "runs in", "marks", "what it is")
    return _page("# Kinds", INTRODUCTION, "\n".join([*table, *rows]), _spec(), _hooks())


def _page(*parts: str) -> str:
    return "\n\n".join([GENERATED, *filter(None, parts)]) + "\n"


def _table(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]


def _marks(kind: Kind) -> str:
    return ", ".join(word for word in ("ambient", "provisional") if getattr(kind, word))


def _spec() -> str:
    explained = dict(re.findall(r"^(\w+): (.*(?:\n +.*)*)", inspect.getdoc(Spec) or "", re.M))
    rows = [f"| `{item.name}` | {cell(explained.get(item.name, ''))} |" for item in fields(Spec)]
    return "\n".join(["## What every spec holds", "", *_table("field", "meaning"), *rows])


def _hooks() -> str:
    functions = [item for name, item in vars(hooks).items() if name.startswith("pegboard_")]
    lines = [
        f"- `{item.__name__}{_signature(item)}` — {first_sentence(item.__doc__)}"
        for item in functions
    ]
    about = (
        f"Group `{HOOKS_GROUP}`, module `pegboard.interfaces.hooks`. "
        f"{joined(hooks.__doc__ or '', paragraph=1)}"
    )
    return f"## Hooks\n\n{about}\n\n" + "\n".join(lines)


# --- docs/kinds/KIND.md ---------------------------------------------------------------------------


def kind_page(kind: Kind) -> str:
    """Return the reference of one kind: how it is chosen, and every class of its interface."""
    module = import_module(kind.spec.partition(":")[0])
    spec = getattr(module, kind.spec.partition(":")[2])
    classes = [item for item in vars(module).values() if _is_of(module, item)]
    need = [item for item in classes if issubclass(item, Need)]
    others = [item for item in classes if item is not spec and item not in need]
    return _page(
        f"# {kind.name}",
        f"{kind.summary[0].upper()}{kind.summary[1:]}.",
        _facts(kind, module, spec),
        _text(module.__doc__),
        "\n\n".join(
            [
                *_class("Spec", spec),
                *(line for item in need for line in _class("Need", item)),
                *(line for item in others for line in _class("", item)),
            ]
        ),
        "[All kinds](../kinds.md) · [How to write a plugin](../plugins.md)",
    )


def _is_of(module: ModuleType, item: object) -> bool:
    return inspect.isclass(item) and item.__module__ == module.__name__


def _facts(kind: Kind, module: ModuleType, spec: type[Spec]) -> str:
    """Return the table of what is true of the kind as a whole."""
    setting = SETTINGS.get(kind.name)
    by = f"`{setting}`" if (setting or "").startswith("--") else setting
    usual = default_enabled(kind.name) or filter(None, [default_name(kind.name)])
    stability = "provisional" if kind.provisional else "stable"
    guide = GUIDES.get(kind.name)
    rows = {
        "entry-point group": f"`{kind.group}`",
        "interface": f"`{module.__name__}` {kind.major}.{kind.minor}, {stability}",
        "chosen by": CHOSEN[kind.chosen] + (f"; setting: {by}" if by else ""),
        "flags of a spec": ", ".join(f"`{flag}`" for flag in sorted(spec.FLAGS)),
        "runs in": ", ".join(
            {"A": "API server", "E": "engine", "W": "worker"}[role]
            for role in kind.roles
            if role in "AEW"
        ),
        "by default": ", ".join(f"`{name}`" for name in usual),
        "guide": f"[{guide}](../{guide})" if guide else "",
        "scaffold": f"`pegboard plugins new {kind.name} my-plugin`",
        "contract tests": ", ".join(f"`{name}`" for name in contracts(kind.name)),
        "examples": ", ".join(examples(kind.name)),
        "plugins of Pegboard": _plugins(kind.name),
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value]
    return "\n".join([*_table("", ""), *lines])


def contracts(kind: str) -> list[str]:
    """Return the import paths of the contract classes of a kind."""
    paths = []
    for name in CONTRACTS.get(kind, (f"contract_{kind}",)):
        if find_spec(f"pegboard_testing.{name}"):
            module = import_module(f"pegboard_testing.{name}")
            paths += [
                f"{module.__name__}.{item}"
                for item, value in vars(module).items()
                if item.endswith("Contract") and _is_of(module, value)
            ]
    return paths


def examples(kind: str) -> list[str]:
    """Return links to the complete example plugins of a kind."""
    folders = sorted((REPOSITORY / "examples/plugins").glob(f"{kind}_*/pyproject.toml"))
    return [
        f"[{path.parent.name}](../../{path.parent.relative_to(REPOSITORY)})" for path in folders
    ]


def _plugins(kind: str) -> str:
    """Return the distributions that provide plugins of the kind, each with how many."""
    names = list(catalogue().get(kind, {}).values())
    return ", ".join(
        f"`{name}`" + (f" ({names.count(name)})" if names.count(name) > 1 else "")
        for name in sorted(set(names))
    )


def _class(title: str, item: type) -> Iterator[str]:
    """Yield the parts about a class. What it inherits is not repeated."""
    yield f"## {title + ': ' if title else ''}`{item.__name__}`"
    doc = inspect.getdoc(item) or ""
    if not doc.startswith(f"{item.__name__}("):  # else dataclasses generated it
        yield _text(doc)
    if is_dataclass(item):
        types = inspect.get_annotations(item)
        rows = [_field(each, str(types[each.name])) for each in fields(item) if each.name in types]
        if rows:
            yield "\n".join([*_table("field", "type", "default"), *rows])
    for name, member in vars(item).items():
        function = getattr(member, "__func__", member)  # the function that a static method wraps
        if inspect.isfunction(function) and (name == "__call__" or not name.startswith("_")):
            yield _method(name, function)


def _field(each: "Field[Any]", annotation: str) -> str:
    default = ""
    if each.default is not MISSING:
        default = f"`{getattr(each.default, '__name__', repr(each.default))}`"
    elif each.default_factory is not MISSING:
        default = f"`{each.default_factory()!r}`"
    shown = re.sub(r"['\"]", "", annotation)
    return f"| `{each.name}` | `{cell(shown)}` | {cell(default)} |"


def _method(name: str, function: Any) -> str:
    text = _text(function.__doc__).replace("\n", "\n  ")
    return f"- `{name}{_signature(function)}`" + (f"\n\n  {text}" if text else "")


def _text(doc: str | None) -> str:
    """Return a docstring as paragraphs. Lines that are indented stay as they are."""
    paragraphs = inspect.cleandoc(doc or "").split("\n\n")
    return "\n\n".join(
        paragraph if re.search(r"^( |- )", paragraph, re.M) else joined(paragraph)
        for paragraph in paragraphs
    ).strip()


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    shown = [parameter for name, parameter in signature.parameters.items() if name != "self"]
    return re.sub(r"['\"]", "", str(signature.replace(parameters=shown)))


# --- docs/stability.md ----------------------------------------------------------------------------

POLICY = """\
An interface has a version of its own, apart from releases. The major version is in the entry-point group (`pegboard.sampler.v1`).

- **Stable.** Inside a major version, nothing that a plugin calls, returns or overrides is taken away or changes its meaning. A minor version
  adds: a field with a default, an optional method, a flag. A plugin that needs an addition says so with `api="1.1"`, and an older
  core refuses it by name. `pegboard plugins compat PATH --before snapshot.txt` compares what a plugin uses with two versions.
- **Provisional.** The interface is used by real plugins, but may change in a release, with a line in the changelog. A provisional interface becomes stable when plugins of two authors have used it through two releases.
- **Two major versions.** A change that breaks plugins raises the major version. Where the table below says *and v1*, plugins of
  the version before are served, too, with one warning, until the interface changes again. `pegboard plugins list` and
  `plugins doctor` name them. A wheel may have entry points for both versions, and the newest that core serves counts.
- **Shared libraries** may be imported, but have no interface version: they may change in a release, with a line in the changelog.
  They are the other packages of Pegboard that [plugins.md](plugins.md#what-may-be-imported) names, such as `pegboard_weights`.
- **What is not an interface**: everything else, which is all outside `pegboard.interfaces`, `.layers`, `.ops`, `.data`, `.errors`,
  `.log`, `.env` and the shared libraries.

A change of the public names shows in `core/pegboard/pegboard/interfaces/snapshot.txt`, which a test compares, so none is by accident."""  # noqa: E501


def _earlier(kind: Kind) -> str:
    return f", and v{kind.major - 1}" if kind.earlier else ""


def stability_page() -> str:
    """Return the page that says kind by kind what is stable."""
    rows = [
        f"| [`{kind.name}`](kinds/{kind.name}.md) | {kind.major}.{kind.minor}{_earlier(kind)} | "
        f"{'provisional' if kind.provisional else 'stable'} | {len(contracts(kind.name))} |"
        for kind in sorted(KINDS.values(), key=lambda each: each.provisional)
    ]
    table = _table("kind", "version", "", "contract classes")
    return _page("# What is stable", POLICY, "\n".join([*table, *rows]))


PAGES = {
    DOCS / "kinds.md": lambda before: kinds_page(),
    DOCS / "stability.md": lambda before: stability_page(),
    **{
        FOLDER / f"{kind.name}.md": partial(lambda each, before: kind_page(each), kind)
        for kind in KINDS.values()
    },
}
