"""What models are built from. These classes are public and have the same version as the interfaces.

A layer is declared with a `Build`, which says where it is in the model and how this engine
computes. Core then calls its methods: declare → accept pieces → finish → bind → calls. After
`bind`, a call is one bound function. Quantization and adapters are chosen in `bind`, so a model
does not know about either.
"""

from __future__ import annotations

from pegboard.layers.activation import Activation
from pegboard.layers.attention import Attention
from pegboard.layers.build import Build, Layer
from pegboard.layers.config import read, size_of
from pegboard.layers.embedding import Embedding, Head
from pegboard.layers.experts import Experts
from pegboard.layers.linear import Linear, QKVLinear
from pegboard.layers.norm import LayerNorm, Norm
from pegboard.layers.rope import Rope, Rotation
from pegboard.layers.stack import LayerStack
from pegboard.layers.states import StateLayer
from pegboard.ops.experts import RouterRule

__all__ = [
    "Activation",
    "Attention",
    "Build",
    "Embedding",
    "Experts",
    "Head",
    "Layer",
    "LayerNorm",
    "LayerStack",
    "Linear",
    "Norm",
    "QKVLinear",
    "Rope",
    "Rotation",
    "RouterRule",
    "StateLayer",
    "read",
    "size_of",
]
