"""MiniCPM3 (OpenBMB 2024): latent attention without experts. Embeddings, blocks and logits are
scaled, as in MiniCPM (Hu et al. 2024), so that models of different sizes train alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.layers import Build, read
from pegboard_model_deepseek.decoder import LatentDecoder
from pegboard_model_deepseek.shape import Shape


class MiniCPM3Model(LatentDecoder):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        shape = Shape(config, is_tied=True)
        depth = read(config, "scale_depth", float)
        width = read(config, "dim_model_base", float)
        self.residual_scale = depth / shape.num_layers**0.5 if depth else 1.0
        super().__init__(
            config,
            build,
            shape,
            pairs=False,
            embed_scale=read(config, "scale_emb", float) or 1.0,
            logits_scale=width / shape.hidden_size if width else 1.0,
        )
