"""Specs of the model sources `local` and `pypi`."""

from __future__ import annotations

from pegboard.interfaces.model_source import ModelSourceSpec

LOCAL = ModelSourceSpec(
    api="1.0",
    implementation="pegboard_model_source_local.directory:DirectorySource",
    flags=frozenset({"directory"}),
)

PYPI = ModelSourceSpec(
    api="1.0",
    implementation="pegboard_model_source_local.pypi:PypiSource",
    options="pegboard_model_source_local.options:PypiOptions",
)
