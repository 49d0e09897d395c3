"""What models are built from. Public, versioned like the interfaces.

A layer is declared with a `Build` (where it sits, how this engine computes), then core drives it:
declare → accept pieces → finish → bind → calls. After `bind` a call is one bound function: quantization and adapters were
chosen there, and a model knows neither.
"""

from __future__ import annotations

from pegboard.layers.activation import Activation
from pegboard.layers.attention import Attention
from pegboard.layers.build import Build, Layer
from pegboard.layers.embedding import Embedding, Head
from pegboard.layers.linear import Linear, QKVLinear
from pegboard.layers.norm import Norm
from pegboard.layers.rope import Rope, Rotation
from pegboard.layers.stack import LayerStack

__all__ = [
    "Activation",
    "Attention",
    "Build",
    "Embedding",
    "Head",
    "Layer",
    "LayerStack",
    "Linear",
    "Norm",
    "QKVLinear",
    "Rope",
    "Rotation",
]
