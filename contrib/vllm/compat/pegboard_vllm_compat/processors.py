"""Logits processors in vLLM's form among the settings of `LLM` and `AsyncLLM`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.errors import ConfigError
from pegboard.log import get_logger
from pegboard_vllm_compat.bridge import Adapted, write
from pegboard_vllm_compat.entry_points import logits_processors, stat_loggers
from pegboard_vllm_compat.logits_interface import LogitsProcessor
from pegboard_vllm_compat.stat_adapter import give, is_stat_logger
from pegboard_vllm_compat.targets import load

log = get_logger(__name__)


def target_of(processor: Any, *, elsewhere: bool) -> str | None:
    """Return "module:Class" of a class in vLLM's form, or None for another processor. elsewhere:
    another process imports it, so that a class of the script is named by the script's file."""
    if isinstance(processor, str) and ":" in processor:
        value = load(processor)
        return processor if is_vllm_form(value) else None
    if not is_vllm_form(processor):
        return None
    module = processor.__module__
    if module == "__main__" and elsewhere:
        module = str(sys.modules[module].__file__)
    return f"{module}:{processor.__qualname__}"


def is_vllm_form(value: Any) -> bool:
    """Return whether this is a class with vLLM's methods."""
    return isinstance(value, type) and issubclass(value, LogitsProcessor)


def adapted(
    processors: Sequence[Any], *, elsewhere: bool, model: str = ""
) -> tuple[list[Any], list[Adapted]]:
    """Return the processors, of which those in vLLM's form are named as plugins, and these. The
    installed ones come first. model: as the user named it."""
    names: list[Any] = []
    items: list[Adapted] = []
    for processor in [*_installed(), *processors]:
        target = target_of(processor, elsewhere=elsewhere)
        if target is None:
            names.append(processor)
            continue
        name = f"vllm-{target.rpartition(':')[2]}"
        items.append(Adapted("logits_processor", name, target, base_model=model))
        names.append(name)
    return names, items


def _installed() -> list[str]:
    """Return "module:Class" of the installed processors in vLLM's form, and warn of others."""
    values = []
    for value in logits_processors():
        if is_vllm_form(load(value)):
            values.append(value)
        else:
            log.warning("the vLLM logits processor %s is left out: it is no LogitsProcessor", value)
    return values


def adapted_loggers(loggers: Sequence[Any] | None, *, model: str = "") -> list[Adapted]:
    """Return the installed stat loggers and those that a program has given, as plugins. An
    installed one that cannot be imported, or has another form, is left out with a warning."""
    targets = []
    for value in stat_loggers():
        try:
            reason = "" if is_stat_logger(load(value)) else "it is no StatLoggerBase"
        except ConfigError as error:
            reason = str(error)
        if reason:
            log.warning("the vLLM stat logger %s is left out: %s", value, reason)
        else:
            targets.append(value)
    targets += [give(factory) for factory in loggers or ()]
    return [
        Adapted("metrics", f"vllm-{number}-{target.rpartition(':')[2]}", target, base_model=model)
        for number, target in enumerate(targets)
    ]


def with_processors(
    settings: Mapping[str, Any],
    model: str | None,
    *,
    elsewhere: bool,
    loggers: Sequence[Adapted] = (),
) -> dict[str, Any]:
    """Return the settings of an engine, in which classes in vLLM's form are plugins. loggers: more
    plugins."""
    processors = settings.get("logits_processors") or ()
    names, items = adapted(processors, elsewhere=elsewhere, model=model or "")
    if not items and not loggers:
        return dict(settings)
    files = settings.get("plugin_files") or []
    files = [files] if isinstance(files, str) else [*files]
    changes: dict[str, Any] = {"logits_processors": names} if items else {}
    return {
        **settings,
        **changes,
        "plugin_files": [*files, str(write([*items, *loggers], shadow=True))],
    }
