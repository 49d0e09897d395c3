"""Layers with one state per request: what a model declares for them."""

from __future__ import annotations

from pegboard.errors import ModelError
from pegboard.interfaces.attention import KVTensor
from pegboard.layers.build import Build, Layer


class StateLayer(Layer):
    """(call, width, *given) → [T, width], in the type of the first that is given. Calls
    `call(states, rows, *given)`, which computes with ops such as those of
    `pegboard_models.state_ops`. states: by name, each [blocks, *shape]. rows: where the rows of
    this step have theirs (`pegboard.ops.StateRows`). given: [T, …], all that the call reads and
    that another step computes anew, because recordings in pieces leave the call out, as they leave
    out attention (see `PiecewiseReplay.outside`).

    layer_index: names the layer's states, as an attention layer's index names its cache; no other
    layer may have it. tensors: the state of one request, those of wider types first.
    """

    def __init__(self, build: Build, layer_index: int, *tensors: KVTensor) -> None:
        super().__init__(build)
        declared = build.declared
        if layer_index in declared.attention or layer_index in declared.states:
            raise ModelError(f"{build.path}: layer index {layer_index} already has a cache")
        self.layer_index = layer_index
        declared.states[layer_index] = tensors

    def bind(self) -> None:
        self.forward = self.build.attention[self.layer_index]
