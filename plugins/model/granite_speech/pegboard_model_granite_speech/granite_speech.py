"""Granite Speech (Saon et al. 2025): a conformer, a Q-Former, and a language model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pegboard.layers import Build, Linear, read, size_of
from pegboard_model_granite_speech.conformer import Conformer
from pegboard_model_granite_speech.sizes import EncoderSizes, Windows
from pegboard_models.language import WithLanguageModel, root_of, text_config
from pegboard_models.parameters import Parameters
from pegboard_models.qformer import QFormer


class GraniteSpeech(WithLanguageModel):
    """The encoder is built only where prompts are embedded."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        if build.has_first_layer:
            self.build_audio(config, build)

    def build_audio(self, config: Mapping[str, Any], build: Build) -> None:
        """Build what `encode` needs."""
        text = text_config(config)
        root = root_of(build)
        sizes = EncoderSizes.of(config.get("encoder_config") or {})
        self.encoder = Conformer(root.at("encoder"), sizes)
        self.windows = Windows.of(config)
        place = root.at("projector").alone()
        self.qformer = QFormer(
            place.at("qformer"), config.get("projector_config") or {}, "projector_config"
        )
        width = self.qformer.hidden_size
        self.queries = Parameters(place, {"query": (1, self.windows.rows, width)})
        hidden_size = size_of(text, "hidden_size")
        self.projector = Linear(place.at("linear"), width, hidden_size, bias=True)
        self.scale = read(text, "embedding_multiplier", float) or 1.0

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: input_features [frames, mel bins] → [rows, hidden] of each. They are scaled as the
        language model scales its embeddings."""
        size = self.windows.size
        features = self.encoder.forward([item["input_features"] for item in items])
        windows = [
            functional.pad(each, (0, 0, 0, -len(each) % size)).unflatten(0, (-1, size))
            for each in features
        ]
        read_by = self.qformer.forward(self.queries["query"][0], torch.cat(windows))
        rows = self.projector(read_by) * self.scale
        return [*rows.split([len(each) * self.windows.rows for each in windows])]
