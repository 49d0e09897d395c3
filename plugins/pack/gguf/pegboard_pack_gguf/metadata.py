"""Typed reading of GGUF metadata. Standard library only."""

from __future__ import annotations

from typing import Any

from pegboard.errors import ModelError
from pegboard_pack_gguf.header import GGUFHeader

MAX_COUNT = 2**31 - 1


class Metadata:
    """The metadata of one file under one prefix ("llama" for "llama.block_count"). Wrong types
    raise ModelError."""

    def __init__(self, header: GGUFHeader, prefix: str) -> None:
        self.header = header
        self.prefix = prefix

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.header.metadata

    def get(self, key: str) -> Any:
        return self.header.metadata.get(f"{self.prefix}.{key}")

    def fail(self, key: str, what: str) -> ModelError:
        return ModelError(f"{self.header.path}: metadata {self.prefix}.{key} {what}")

    def count(self, key: str, default: int | None = None) -> int:
        """Returns a count, which is at least 1. A list with one value per layer is accepted when
        all values are equal."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing")
            return default
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise self.fail(key, "differs between layers, which is not supported")
            value = value[0]
        if type(value) is not int or not 1 <= value <= MAX_COUNT:
            raise self.fail(key, f"is {value!r}, expected a number from 1 to {MAX_COUNT}")
        return value

    def optional_count(self, key: str) -> int:
        """Returns a count, 0 if the file has none."""
        return self.count(key) if self.get(key) not in (None, 0) else 0

    def layer_counts(
        self, key: str, num_layers: int, default: list[int] | None = None
    ) -> list[int]:
        """Returns a count for each layer, which may be 0. One number is that of all layers. A list
        may also have those of the layers that draft tokens, which come last."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing")
            return default
        values = value if isinstance(value, list) else [value] * num_layers
        if len(values) not in (num_layers, self.get("block_count")) or any(
            type(each) is not int or not 0 <= each <= MAX_COUNT for each in values
        ):
            raise self.fail(
                key,
                (
                    f"is {value!r}, expected a number from 0 to {MAX_COUNT} for each of "
                    f"{num_layers} layers"
                ),
            )
        return values[:num_layers]

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a positive finite number. float32 values are returned as the shortest decimal
        that represents them: 1e-05, not 9.99…e-06."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing")
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < float("inf")
        ):
            raise self.fail(key, f"is {value!r}, expected a positive number")
        return float(f"{value:.7g}")

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.fail(key, f"is {value!r}, expected text")
        return value

    def token_id(self, key: str) -> int | None:
        """Returns a token id. -1, which some converters write for "none", gives None."""
        value = self.get(key)
        if value is None or value in (-1, 2**32 - 1):
            return None
        if type(value) is not int or not 0 <= value <= MAX_COUNT:
            raise self.fail(key, f"is {value!r}, expected a token id")
        return value
