"""The steps Dense of sentence-transformers: linear layers after the pooling."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from pegboard.errors import ModelError

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": functional.relu,
    "GELU": functional.gelu,
    "Sigmoid": torch.sigmoid,
    "SiLU": functional.silu,
}


class Dense:
    """activation(x · weightᵀ + bias), in float32: [n, in] → [n, out]. The weights move to the
    device of the first input."""

    def __init__(self, file: str, activation: str) -> None:
        self._file = file
        try:
            tensors = load_file(Path(file))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
        weight = tensors.get("linear.weight")
        if weight is None or weight.dim() != 2:
            raise ModelError(f"{file} has no matrix linear.weight, which the step Dense needs")
        self._weight = weight.float()
        bias = tensors.get("linear.bias")
        self._bias = None if bias is None else bias.float()
        self._activation = ACTIVATIONS[activation]

    def __call__(self, states: Tensor) -> Tensor:
        if self._weight.device != states.device:
            self._weight = self._weight.to(states.device)
            self._bias = None if self._bias is None else self._bias.to(states.device)
        if states.shape[-1] != self._weight.shape[1]:
            raise ModelError(
                f"{self._file}: the step Dense takes {self._weight.shape[1]} values, and the "
                f"states have {states.shape[-1]}"
            )
        return self._activation(functional.linear(states.float(), self._weight, self._bias))


def make_dense(listed: str) -> list[Dense]:
    """Return the layers that the plan has written as JSON."""
    return [Dense(file, activation) for file, activation in json.loads(listed)]
