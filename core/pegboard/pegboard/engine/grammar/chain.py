"""Chooses the structured output plugins of an engine and builds its grammars."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from pegboard.config.schema import StructuredOutputsConfig, structured_outputs_config
from pegboard.engine.grammar.grammars import Grammars
from pegboard.errors import blame
from pegboard.interfaces.structured_output import StructuredOutputNeed, StructuredOutputSetup
from pegboard.plan.engine_plan import read_vocabulary
from pegboard.plugins.registry import Registry

if TYPE_CHECKING:
    from pegboard.plan.engine_plan import EnginePlan

MAX_FILL_THREADS = 4
"""The number of threads that fill masks. This is little work, and more threads would cost more than they save."""


def make_grammars(registry: Registry, plan: "EnginePlan") -> Grammars | None:
    """Return the grammars of an engine, or None if there is no plugin or no tokenizer. Nothing is read or compiled before the
    first constraint arrives."""
    config = structured_outputs_config(plan.settings.engine)
    if plan.settings.engine.skip_tokenizer_init:
        return None
    setup = make_setup(registry, plan)
    chain = {entry.name: registry.build(entry, setup) for entry in _chosen(registry, config)}
    if not chain:
        return None
    return Grammars(
        chain,
        vocab_size=plan.vocab_size,
        config=config,
        token_bytes=lambda: setup.vocabulary.token_bytes,
        blaming=partial(blame, modules=registry.modules),
    )


def make_setup(registry: Registry, plan: "EnginePlan") -> StructuredOutputSetup:
    """Return the setup that every backend is built with. It reads no files yet."""
    num_threads = min(MAX_FILL_THREADS, plan.settings.engine.num_threads or os.cpu_count() or 1)
    return StructuredOutputSetup(plan.vocab_size, partial(read_vocabulary, registry, plan), plan.eos_token_ids, num_threads)


def _chosen(registry: Registry, config: StructuredOutputsConfig) -> list[Any]:
    """Return the plugins to ask, in order. A plugin that was requested by name must support the configuration; "auto" leaves out
    the plugins that do not."""
    need = StructuredOutputNeed(compact=config.disable_any_whitespace)
    if config.names:
        decisions = [registry.choose("structured_output", need, explicit=name, key=name) for name in config.names]
        return [decision.require() for decision in decisions]
    decision = registry.choose("structured_output", need, required=False)
    ranked = [candidate.entry for candidate in decision.candidates if candidate.gate in ("selected", "ranked")]
    return ranked[:1] if config.disable_fallback else ranked
