"""RWKV-4 (Peng et al. 2023): tokens are mixed by a weighted mean of all values before them, whose
weights decay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pegboard.interfaces.attention import KVTensor
from pegboard.layers import Build, LayerNorm, Linear, StateLayer, read
from pegboard.ops import StateRows
from pegboard_model_mamba.decoder import block
from pegboard_models.decoder import Decoder, DecoderSizes, Names
from pegboard_models.parameters import Parameters

NAMES = Names(root="rwkv", embedding="embeddings", layers="blocks", norm="ln_out", head="head")


class RWKVModel(Decoder):
    """`rescale_every` is not read. It halves the sum after some layers, so that it fits in float16,
    and the last norm undoes it."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        eps = read(config, "layer_norm_epsilon", float) or 1e-5
        sizes = DecoderSizes({**config, "rms_norm_eps": eps})
        hidden = sizes.hidden_size

        def make(build: Build, index: int) -> nn.Module:
            states = BlockStates(build, index, hidden, read(config, "attention_hidden_size", int))
            inner = read(config, "intermediate_size", int) or 4 * hidden
            parts = (
                ("ln1", TimeMix(build.at("attention"), hidden, states)),
                ("ln2", ChannelMix(build.at("feed_forward"), hidden, inner, states)),
            )
            layer = block(build, hidden, eps, *parts, norm=LayerNorm)
            if index:
                return layer
            return NormalizedFirst(LayerNorm(build.at("pre_ln"), hidden, eps), layer)

        super().__init__(build, make, sizes, norm=LayerNorm, names=NAMES)


class NormalizedFirst(nn.Module):
    """A layer after a norm of its inputs, which is a part of the sum."""

    def __init__(self, norm: LayerNorm, layer: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.layer = layer

    def forward(
        self, hidden: Tensor, residual: Tensor | None, *step: Any
    ) -> tuple[Tensor, Tensor | None]:
        out: tuple[Tensor, Tensor | None] = self.layer(self.norm(hidden), residual, *step)
        return out


class BlockStates:
    """The state of a request in both parts of a block. width: channels of the time mix."""

    def __init__(self, build: Build, index: int, hidden: int, width: int | None) -> None:
        self.hidden = hidden
        self.width = width or hidden
        self.states = StateLayer(
            build,
            index,
            KVTensor("wkv", (self.width, 3), "float32"),
            KVTensor("time", (hidden, 1), build.dtype),
            KVTensor("channel", (hidden, 1), build.dtype),
        )
        self._conv = build.kernels["causal_conv"]
        self._wkv = build.kernels["wkv"]
        dtype = getattr(torch, build.dtype)
        self._before = torch.tensor([[1.0, 0.0]], dtype=dtype, device=build.device).repeat(
            hidden, 1
        )

    def before(self, x: Tensor, name: str) -> Tensor:
        """Return the token before each token, [T, hidden]. That of the first one is zero."""

        def call(states: Mapping[str, Tensor], rows: StateRows, x: Tensor) -> Tensor:
            out: Tensor = self._conv(x, self._before, None, states[name], rows, False)
            return out

        out: Tensor = self.states(call, self.hidden, x)
        return out

    def mixed(self, key: Tensor, value: Tensor, decay: Tensor, first: Tensor) -> Tensor:
        """Return the mean of the values, [T, width]: see `pegboard_models.state_ops.wkv`."""

        def call(
            states: Mapping[str, Tensor], rows: StateRows, key: Tensor, value: Tensor
        ) -> Tensor:
            out: Tensor = self._wkv(key, value, decay, first, states["wkv"], rows)
            return out

        out: Tensor = self.states(call, self.width, key, value)
        return out


class Mix(Parameters):
    """Mixes a token with the one before it, by a share for each channel: (x, before, name) → [T,
    hidden]. names: of the shares."""

    def __init__(self, build: Build, hidden: int, *names: str) -> None:
        super().__init__(build, {f"time_mix_{name}": (1, 1, hidden) for name in names})

    def forward(self, x: Tensor, before: Tensor, name: str) -> Tensor:
        share = self[f"time_mix_{name}"].view(-1)
        return x * share + before * (1 - share)


class TimeMix(nn.Module):
    """[T, hidden] → [T, hidden]."""

    def __init__(self, build: Build, hidden: int, states: BlockStates) -> None:
        super().__init__()
        width = states.width
        self.states = states
        self.mix = Mix(build, hidden, "key", "value", "receptance")
        self.times = Parameters(
            build, {"time_decay": (width,), "time_first": (width,)}, dtype="float32"
        )
        self.key = Linear(build.at("key"), hidden, width)
        self.value = Linear(build.at("value"), hidden, width)
        self.receptance = Linear(build.at("receptance"), hidden, width)
        self.output = Linear(build.at("output"), width, hidden)

    def forward(self, x: Tensor, *step: Any) -> Tensor:
        before = self.states.before(x, "time")
        key = self.key(self.mix(x, before, "key"))
        value = self.value(self.mix(x, before, "value"))
        gate = self.receptance(self.mix(x, before, "receptance")).sigmoid()
        decay = -self.times["time_decay"].exp()
        out: Tensor = self.output(
            gate * self.states.mixed(key, value, decay, self.times["time_first"])
        )
        return out


class ChannelMix(nn.Module):
    """[T, hidden] → [T, hidden]."""

    def __init__(self, build: Build, hidden: int, inner: int, states: BlockStates) -> None:
        super().__init__()
        self.states = states
        self.mix = Mix(build, hidden, "key", "receptance")
        self.key = Linear(build.at("key"), hidden, inner)
        self.receptance = Linear(build.at("receptance"), hidden, hidden)
        self.value = Linear(build.at("value"), inner, hidden)

    def forward(self, x: Tensor, *step: Any) -> Tensor:
        before = self.states.before(x, "channel")
        key = self.key(self.mix(x, before, "key")).relu().square()
        gate = self.receptance(self.mix(x, before, "receptance")).sigmoid()
        out: Tensor = gate * self.value(key)
        return out
