"""Finds the function that builds an engine. Imports torch only when asked to load the default one."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from pegboard.errors import ConfigError

BUILDER = "pegboard.engine.build:build_engine"
"""The default: "module:function", called with the plan, returns an Engine."""


def load_builder(builder: str) -> Callable[[Any], Any]:
    """The function "module:function" names. Importing the default one takes seconds: it brings torch."""
    module, _, name = builder.partition(":")
    try:
        function: Callable[[Any], Any] = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError("running a model needs torch, which is not installed: pip install 'pegboard[torch]'") from error
    return function
