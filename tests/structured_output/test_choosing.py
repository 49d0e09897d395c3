"""The backends that an engine tries, and how `pegboard plugins why` explains the choice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pegboard.config.sources import engine_settings
from pegboard.data.sampling_params import StructuredOutputsParams
from pegboard.engine.build import make_grammars
from pegboard.engine.grammar.grammars import Grammars
from pegboard.errors import ConfigError, PluginNotFound, PluginUnsuitable, RequestError
from pegboard.plan.engine_plan import resolve

ALL = ["xgrammar", "guidance", "outlines", "lm-format-enforcer"]


def grammars(model: Path, **config: Any) -> Grammars:
    plan, registry = resolve(engine_settings(str(model), {"structured_outputs_config": config}))
    return make_grammars(registry, plan)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ALL),
        ({"backend": "auto"}, ALL),
        ({"disable_fallback": True}, ["xgrammar"]),
        ({"disable_any_whitespace": True}, ["xgrammar", "guidance"]),
        ({"backend": "outlines"}, ["outlines"]),
        ({"backend": ["lm-format-enforcer", "guidance"]}, ["lm-format-enforcer", "guidance"]),
    ],
)
def test_the_chain(smollm2_gguf: Path, config: dict[str, Any], expected: list[str]) -> None:
    assert list(grammars(smollm2_gguf, **config).compiler.chain) == expected


def test_what_cannot_be_is_said_at_the_start(smollm2_gguf: Path) -> None:
    with pytest.raises(
        PluginUnsuitable, match="'outlines' was asked for but is unsuitable: compact=True"
    ):
        grammars(smollm2_gguf, backend="outlines", disable_any_whitespace=True)
    with pytest.raises(PluginNotFound, match="xgramar"):
        grammars(smollm2_gguf, backend="xgramar")
    with pytest.raises(ConfigError, match="backend"):
        grammars(smollm2_gguf, backend=["auto", "outlines"])


def test_a_constraint_only_others_enforce_is_refused_by_a_single_backend(
    smollm2_gguf: Path,
) -> None:
    unique = StructuredOutputsParams(
        json={"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}
    )
    every = grammars(smollm2_gguf)
    every.check(StructuredOutputsParams(json={"type": "string", "format": "ipv4"}))
    with pytest.raises(
        RequestError, match="the json constraint cannot be enforced .outlines: uniqueItems"
    ):
        grammars(smollm2_gguf, backend="outlines").check(unique)


def why(*needs: str) -> dict[str, Any]:
    words = [sys.executable, "-m", "pegboard", "plugins", "why", "structured_output", "--json"]
    for need in needs:
        words += ["--need", need]
    return dict(
        json.loads(
            subprocess.run(words, capture_output=True, text=True, check=False, timeout=120).stdout
        )
    )


def test_why_explains_by_constraint() -> None:
    found = why("constraint=grammar")
    assert found["winner"]["name"] == "xgrammar"
    reasons = {candidate["name"]: candidate["reason"] for candidate in found["candidates"]}
    assert "constraint 'grammar' not in" in reasons["outlines"]


def test_why_explains_by_the_very_schema() -> None:
    schema = json.dumps({"type": "array", "items": {"type": "string", "format": "ipv4"}})
    found = why("constraint=json", f"text={schema}")
    reasons = {candidate["name"]: candidate["reason"] for candidate in found["candidates"]}
    assert found["winner"]["name"] == "guidance"
    assert reasons["xgrammar"] == "format 'ipv4' is not enforced at #/items"
