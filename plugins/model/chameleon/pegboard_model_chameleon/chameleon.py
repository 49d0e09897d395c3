"""Chameleon (Chameleon Team 2024): the codes of an image are tokens of the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.layers import Build, size_of
from pegboard_model_chameleon.encoder import Codes
from pegboard_model_chameleon.language import ChameleonText
from pegboard_model_chameleon.sizes import EncoderSizes, hidden_tokens, image_tokens


class Chameleon(ChameleonText):
    """The encoder is built only where prompts are embedded. Tokens of images have the least logit,
    so they are not chosen. Adapters of the embedding are refused, because rows of images come
    from it."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        self.embedding.build = self.embedding.build.alone()
        vocab_size = size_of(config, "vocab_size")
        self.least = torch.zeros(vocab_size, device=build.device)
        self.least[hidden_tokens(config, vocab_size)] = torch.finfo(torch.float32).min
        if build.has_first_layer:
            sizes = EncoderSizes.of(config.get("vq_config") or {})
            place = build.at("model").at("vqmodel").alone()
            self.codes = Codes(place, sizes)
            self.tokens = torch.from_numpy(image_tokens(config)).to(build.device)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: pixel_values [3, resolution, resolution] → [rows, hidden] of each."""
        codes = self.codes.forward(torch.stack([item["pixel_values"] for item in items]))
        rows = self.embed(self.tokens[codes.flatten()])
        return rows.split(codes.shape[1])

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) + self.least
