"""Imports what a vLLM user names: "module:Class" or "FILE.py:Class"."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from pegboard.errors import ConfigError
from pegboard_vllm_compat import finder


@cache
def run_file(path: str) -> ModuleType:
    """Run a Python file, once per process, and return its module. Raises ConfigError if there is
    no such file."""
    return new_module(path)


def new_module(path: str) -> ModuleType:
    """Run a Python file and return its module. Raises ConfigError if there is no such file."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"there is no file {path}")
    name = f"pegboard_vllm_file_{file.stem}"
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@cache
def provide(target: str, *, shadow: bool = False) -> None:
    """Run what registers plugins, once per process: "FILE.py", or the function "module:function".
    shadow: as in `finder.install`."""
    if target.endswith(".py"):
        finder.install(shadow=shadow)
        run_file(target)
    else:
        load(target, shadow=shadow)()


def load(target: str, *, shadow: bool = False) -> Any:
    """Return the object that is named, with `import vllm` working. shadow: as in `finder.install`.
    Raises ConfigError if there is none."""
    finder.install(shadow=shadow)
    place, _, path = target.rpartition(":")
    try:
        value: Any = run_file(place) if place.endswith(".py") else import_module(place)
        for name in path.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{target!r} cannot be imported: {error}") from error
    return value
