"""The decoder that all models of this package are: layers whose parts each add their results to a
residual stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from pegboard.errors import ModelError
from pegboard.layers import Build, Norm, Rope, read, size_of
from pegboard_models.blocks import PreNorm, SelfAttention, heads_of
from pegboard_models.decoder import Decoder, DecoderSizes
from pegboard_models.norms import each_head
from pegboard_models.rope import rope_parameters, scaled_rope

MakeLayer = Callable[[Build, int, Rope | None], nn.Module]
"""(build, index, rope) → a layer, as `LayerStack` calls it. The step is a rotation, or None."""


class StateDecoder(Decoder):
    """rotary_dim: channels of a head that are rotated; 0 = none. is_tied: whether the head has the
    embedding's weights if the config does not say it. more: of `Decoder`."""

    def __init__(
        self,
        config: Mapping[str, Any],
        build: Build,
        make: MakeLayer,
        *,
        eps: float,
        rotary_dim: int = 0,
        is_tied: bool = False,
        **more: Any,
    ) -> None:
        if (act := read(config, "hidden_act", str) or "silu") != "silu":
            raise ModelError(
                f"the checkpoint's config has hidden_act={act!r}; this architecture is served "
                "with silu"
            )
        rope: Rope | None = None
        if rotary_dim:
            rope = rope_of(build, config, rotary_dim)
        sizes = DecoderSizes({**config, "rms_norm_eps": eps}, is_tied=is_tied)
        super().__init__(
            build, lambda build, index: make(build, index, rope), sizes, rope=rope, **more
        )


def rope_of(build: Build, config: Mapping[str, Any], rotary_dim: int) -> Rope:
    """Return the rotary embedding that the config names. rotary_dim: channels of a head that are
    rotated."""
    base, scaling = rope_parameters(config)
    scaling = {name: value for name, value in scaling.items() if name != "partial_rotary_factor"}
    positions = read(config, "max_position_embeddings", int) or 2048
    return scaled_rope(build, rotary_dim, max_positions=positions, base=base, scaling=scaling)


def block(
    build: Build,
    hidden: int,
    eps: float,
    *parts: tuple[str, nn.Module],
    factor: float = 1.0,
    norm: type[Norm] = Norm,
) -> PreNorm:
    """Return a layer of parts, each with the name of the norm before it."""
    return PreNorm(
        *((norm(build.at(name), hidden, eps), part) for name, part in parts), factor=factor
    )


def attention(
    build: Build,
    index: int,
    config: Mapping[str, Any],
    rope: Rope | None = None,
    *,
    norms: tuple[str, str] | None = None,
    eps: float = 1e-6,
    **more: Any,
) -> SelfAttention:
    """Return grouped-query attention. norms: names of the norms of each head's query and key. more:
    of `SelfAttention`."""
    if norms is not None:
        more |= {"norm": partial(each_head, eps=eps), "names": norms}
    return SelfAttention(
        build,
        index,
        size_of(config, "hidden_size"),
        heads_of(config),
        rope=rope,
        bias=bool(read(config, "attention_bias", bool)),
        **more,
    )


def head_size(config: Mapping[str, Any]) -> int:
    """Return the channels of an attention head."""
    return read(config, "head_dim", int) or size_of(config, "hidden_size") // size_of(
        config, "num_attention_heads"
    )
