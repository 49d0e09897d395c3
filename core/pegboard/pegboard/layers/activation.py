"""The activation of the feed-forward block."""

from __future__ import annotations

from pegboard.errors import ModelError
from pegboard.layers.build import Build, Layer

OPS = {"silu": "silu_mul", "swish": "silu_mul", "gelu_pytorch_tanh": "gelu_tanh_mul"}


class Activation(Layer):
    """Gated activation [T, 2F] → [T, F], given by its Hugging Face name (`hidden_act`)."""

    def __init__(self, build: Build, kind: str) -> None:
        super().__init__(build)
        if kind not in OPS:
            raise ModelError(f"{build.path}: unknown activation {kind!r}; known: {', '.join(OPS)}")
        self.kind = kind

    def bind(self) -> None:
        self.forward = self.build.kernels[OPS[self.kind]]
