"""The type in which adapters are kept by default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import Reference

from pegboard.config.sources import engine_settings
from pegboard.engine.platform_defaults import with_platform_defaults
from pegboard.plan.engine_plan import resolve


def lora_dtype(model: Path, **settings: Any) -> str:
    plan, registry = resolve(engine_settings(str(model), {"device": "cpu", **settings}))
    return with_platform_defaults(registry, plan).lora_dtype


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"max_loras": 1}, "bfloat16"),
        ({"max_loras": 1, "dtype": "float32"}, "auto"),
        ({"max_loras": 1, "lora_dtype": "float32"}, "float32"),
        ({}, "auto"),
    ],
)
def test_adapters_of_packed_weights(
    smollm2_gguf: Path, settings: dict[str, Any], dtype: str
) -> None:
    assert lora_dtype(smollm2_gguf, **settings) == dtype


def test_adapters_of_plain_weights_have_the_type_of_the_model(
    write: Callable[..., Reference],
) -> None:
    checkpoint = write("llama")
    assert lora_dtype(checkpoint.directory, max_loras=1) == "auto"
