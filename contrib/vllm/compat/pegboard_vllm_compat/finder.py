"""Puts a package `vllm` into `sys.modules` when it is imported. What it contains is data
(`names.py`); each name is imported from its home when it is first used."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any

from pegboard.errors import UsageError
from pegboard_vllm_compat.names import ABSENT, MODULES

ROOT = "vllm"


class VllmFinder(MetaPathFinder, Loader):
    """Finds `vllm` and the modules below it, and raises ModuleNotFoundError for those that do not
    exist here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the table, or None for other packages."""
        if fullname.partition(".")[0] != ROOT:
            return None
        if not is_module(fullname):
            # `from vllm import name` would hide the error if it had the name of the module
            raise ModuleNotFoundError(explain(fullname))
        return spec_from_loader(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Let the module look up its names in the table."""
        name = module.__name__
        module.__doc__ = f"{name}, as pegboard-vllm-compat provides it."
        module.__all__ = list(MODULES.get(name, ()))  # type: ignore[attr-defined]
        module.__getattr__ = partial(look_up, module)  # type: ignore[method-assign]


def is_module(name: str) -> bool:
    """Return whether the table has this module, or one below it."""
    return name in MODULES or any(other.startswith(f"{name}.") for other in MODULES)


def look_up(module: ModuleType, name: str) -> Any:
    """Return the object that `name` stands for in a module, and keep it there. Raises
    AttributeError."""
    home = MODULES.get(module.__name__, {}).get(name)
    if home is None:
        full = f"{module.__name__}.{name}"
        if is_module(full):
            return import_module(full)
        raise AttributeError(explain(full), name=name, obj=module)
    source, _, attribute = home.partition(":")
    value = getattr(import_module(source), attribute)
    setattr(module, name, value)
    return value


def known_names() -> Iterator[str]:
    """Yield every module and every name of the table, as `vllm.module.name`."""
    for module, names in MODULES.items():
        yield module
        yield from (f"{module}.{name}" for name in names)


def explain(name: str) -> str:
    """Return why `name` does not exist here, and what comes closest."""
    text = f"pegboard-vllm-compat does not have {name}"
    for absent, reason in ABSENT.items():
        if name == absent or name.startswith(f"{absent}."):
            return f"{text}: {reason}"
    every = list(known_names())
    last = name.rpartition(".")[2]
    same = [other for other in every if other.rpartition(".")[2] == last]
    near = same or get_close_matches(name, every, n=1, cutoff=0.5)
    return f"{text}; {f'the nearest name is {near[0]}' if near else 'see docs/vllm_scripts.md'}"


def install(*, shadow: bool = False) -> None:
    """Make `import vllm` work in this process. shadow: also if a real vllm is installed, which is
    hidden then. Raises UsageError otherwise."""
    if any(isinstance(finder, VllmFinder) for finder in sys.meta_path):
        return
    if not shadow and (ROOT in sys.modules or find_spec(ROOT) is not None):
        raise UsageError(
            "a real vllm is installed in this environment: run the script with it, or give "
            "--shadow to hide it"
        )
    for name in [name for name in sys.modules if name.partition(".")[0] == ROOT]:
        del sys.modules[name]
    sys.meta_path.insert(0, VllmFinder())
