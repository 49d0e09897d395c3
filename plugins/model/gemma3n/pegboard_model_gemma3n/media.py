"""Gemma 3n with images and audio: its language model, an audio encoder, and a vision tower. Parts
that a checkpoint does not have are not built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.layers import Build, Layer, size_of
from pegboard_model_gemma3n.audio import AudioEncoder
from pegboard_model_gemma3n.embedder import Embedder
from pegboard_model_gemma3n.sizes import (
    TOKENS,
    AudioSizes,
    Embedded,
    check_vision,
    reads,
    soft_tokens,
)
from pegboard_model_gemma3n.stages import STAGES
from pegboard_model_gemma3n.vision import VisionTower
from pegboard_models.language import WithLanguageModel, root_of, text_config
from pegboard_models.processing import token_of


class Gemma3nMedia(WithLanguageModel):
    """Tokens of the vocabularies of images and of audio have their embeddings in other tables than
    those of text."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        config = whole_config(config)
        super().__init__(config, build)
        text = text_config(config)
        self.hidden_size = size_of(text, "hidden_size")
        self.vocab_size = size_of(text, "vocab_size")
        root = root_of(build)
        self.embedders: dict[str, Embedder] = {}
        self.inputs: dict[str, ItemInputs] = {}
        if reads(config, build.stored, "vision"):
            self.build_vision(config, root)
        if reads(config, build.stored, "audio"):
            self.build_audio(config, root)

    def build_vision(self, config: Mapping[str, Any], root: Build) -> None:
        """Build what images need."""
        check_vision(config)
        embedded = Embedded.of(config, "vision")
        stop = Embedded.of(config, "audio").start
        embedded.check("vision", stop)
        self.tower = VisionTower(root.at("vision_tower.timm_model"), STAGES)
        self.add("image", "vision", config, root, stop)
        self.vision_scale = embedded.size**0.5

    def build_audio(self, config: Mapping[str, Any], root: Build) -> None:
        """Build what audio needs."""
        self.num_rows = soft_tokens(config, "audio_soft_tokens_per_image")
        Embedded.of(config, "audio").check("audio", self.vocab_size)
        self.encoder = AudioEncoder(root.at("audio_tower"), AudioSizes.of(config))
        self.add("audio", "audio", config, root, self.vocab_size)

    def add(
        self, modality: str, part: str, config: Mapping[str, Any], root: Build, stop: int
    ) -> None:
        """Build what makes embeddings of the features of a modality. stop: the token after those of
        its vocabulary."""
        place = root.at(f"embed_{part}")
        embedded = Embedded.of(config, part)
        self.embedders[modality] = Embedder(place, embedded, self.hidden_size, stop)
        token = token_of(config, modality, TOKENS[modality])
        self.inputs[modality] = ItemInputs(root, self.language, token)

    def embed(self, input_ids: Tensor, *more: Tensor) -> Tensor:
        whole = super().embed(input_ids, *more)
        rows: Tensor = whole[:, : self.hidden_size]
        for embedder in self.embedders.values():
            rows = embedder.replaced(input_ids, rows)
        return torch.cat((rows, whole[:, self.hidden_size :]), 1)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: for images, pixel_values [3, height, width]; for audio, input_features [frames,
        mel bins] → [rows, width of the rows of `embed`] of each. The layers' own inputs are those
        of the token that stands for a row."""
        if modality not in self.embedders:
            raise ModelError(
                f"the checkpoint has no tensors that read items of the modality {modality}; use "
                "one that has them"
            )
        make = self.image if modality == "image" else self.audio
        inputs = self.inputs[modality]()
        rows = [make(item) for item in items]
        return [torch.cat((each, inputs.expand(len(each), -1)), 1) for each in rows]

    def image(self, item: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings of an image."""
        features = self.tower.forward(item["pixel_values"])
        return self.embedders["image"].features(features * self.vision_scale)

    def audio(self, item: Mapping[str, Tensor]) -> Tensor:
        """Return the embeddings of audio. Short audio is filled up with that of the last token."""
        embedder = self.embedders["audio"]
        rows = embedder.features(self.encoder.forward(item["input_features"]))
        last = torch.tensor([self.vocab_size - 1 - embedder.start], device=rows.device)
        filling = embedder.tokens(last).expand(self.num_rows - len(rows), -1)
        return torch.cat((rows, filling))


class ItemInputs(Layer):
    """() → the layers' own inputs of the token that stands for a row, [1, layers · layer_size].
    Adapters do not change them, because rows are kept for other requests."""

    def __init__(self, build: Build, language: Any, token: int) -> None:
        super().__init__(build)
        self.tables = language.layer_tables
        self.known = language.known
        self.scale = language.shape.layer_size**0.5
        self.token = token

    def bind(self) -> None:
        lookup = self.tables.method.bind(self.build.kernels)
        token = torch.tensor([self.token], device=self.build.device)
        self.forward = lambda: lookup(self.known(token)) * self.scale


def whole_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with a text_config and with what it leaves out."""
    text = config.get("text_config")
    text = dict(text if isinstance(text, Mapping) else config)
    is_tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    tied = {"tie_word_embeddings": is_tied is not False}
    return {**config, "text_config": {**text, "model_type": "gemma3n_text", **tied}, **tied}
